"""What is wrong with the objects of a file, before a cluster sees them.

A PyTorchJob, whoever wrote it, is checked for its structure (`crd`) and by what the operator would
refuse, or let hang (`admission`). Of other kinds nothing is known here: they are left out.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from gptddp.k8s.render import admission, crd
from gptddp.k8s.render.problem import REPLICAS, Problem

if TYPE_CHECKING:
    from gptddp.k8s.render.documents import Document

KIND, VERSION = "PyTorchJob", "kubeflow.org/v1"
_PLACEHOLDER = r"\$\{[^}]+\}|\$[A-Za-z_]\w*|\{\{.*?\}\}|<[A-Za-z][\w .-]*>"


class Verdict(NamedTuple):
    """Of one object: where it stands, and its problems with their lines; `checked`: is it known?"""

    file: str
    line: int
    kind: str
    name: str
    problems: list[tuple[int, Problem]]
    checked: bool = True


def judge(document: "Document") -> Verdict:
    """The problems of an object, by their lines."""
    job = document.value if isinstance(document.value, dict) else {}
    meta = job.get("metadata")
    name = (meta.get("name") or meta.get("generateName")) if isinstance(meta, dict) else None
    found = [*document.problems]
    if not any(problem.id == "yaml" for problem in found):
        found += _head(document.value)
    ours = job.get("kind") == KIND and job.get("apiVersion") == VERSION
    if ours:
        found += check(job)
    lines = sorted(
        (
            (document.line(problem.field), _of_template(problem, document))
            for problem in dict.fromkeys(found)
        ),
        key=lambda it: it[0],
    )
    kind = str(job.get("kind") or "object")
    return Verdict(document.file, document.first, kind, str(name or ""), lines, bool(found) or ours)


def _of_template(problem: Problem, document: "Document") -> Problem:
    """With another fix where a placeholder stands that nobody has filled in."""
    left = re.search(_PLACEHOLDER, document.word(problem.field))
    if not left or problem.id == "unknown-field":
        return problem
    how = ", as with `envsubst`" if left[0].startswith("$") else ""
    return Problem(problem.id, problem.field, problem.rule, f"fill in {left[0]} first{how}")


def check(job: dict[str, Any]) -> list[Problem]:
    """Every problem of a PyTorchJob: of its structure, and by the rules, each field once."""
    found = [*_name(job), *crd.check(job)]
    if any(problem.id == "missing-field" and problem.field == "spec" for problem in found):
        return found
    if not found and (bare := list(_without_pods(job))):
        return bare
    wrong = {problem.field for problem in found}
    found += [
        it
        for it in admission.check_job(_named(job), malformed=bool(found))
        if it.field not in wrong
    ]
    return found


def _without_pods(job: dict[str, Any]) -> Iterator[Problem]:
    """The CRD does not ask for what makes a pod; the operator's webhook does."""
    for role, replica in (job["spec"]["pytorchReplicaSpecs"] or {}).items():
        spec = ((replica or {}).get("template") or {}).get("spec") or {}
        if not spec.get("containers"):
            field = f"{REPLICAS}.{role}.template.spec.containers"
            yield Problem("missing-field", field, "is missing", "add a container named pytorch")


def _head(value: Any) -> Iterator[Problem]:
    """What says what an object is."""
    if not isinstance(value, dict):
        rule = "is no object with apiVersion and kind"
        fix = "compare it with `gptddp-k8s render`; a job.toml is read from a file"
        yield Problem("kind", "document", rule, fix)
        return
    kind, version = value.get("kind"), value.get("apiVersion")
    for key, there in (("kind", kind), ("apiVersion", version)):
        if not isinstance(there, str) or not there:
            fix = f"write {key}: {KIND if key == 'kind' else VERSION}"
            yield Problem("kind", key, "is missing", f"{fix}, or what it is")
            return
    of_operator = str(version).partition("/")[0] == "kubeflow.org"
    if kind != KIND and of_operator and _is_near(str(kind)):
        yield Problem("kind", "kind", f"{kind!r} is unknown", f"write {KIND}")
    elif kind == KIND and version != VERSION:
        yield Problem("kind", "apiVersion", f"{version!r} has no {KIND}", f"write {VERSION}")


def _is_near(kind: str) -> bool:
    import difflib

    return bool(difflib.get_close_matches(kind.lower(), [KIND.lower()], cutoff=0.8))


def _name(job: dict[str, Any]) -> Iterator[Problem]:
    """A name is not in the CRD: the API server asks for it, or for the beginning of one."""
    meta = job.get("metadata")
    if isinstance(meta, dict) and not (meta.get("name") or meta.get("generateName")):
        yield Problem("missing-field", "metadata.name", "is missing", "add it")


def _named(job: dict[str, Any]) -> dict[str, Any]:
    """With a name as long as the server will make it, where it has only the beginning of one."""
    meta = job.get("metadata")
    if not isinstance(meta, dict) or meta.get("name"):
        return job
    return {**job, "metadata": {**meta, "name": f"{meta.get('generateName') or 'x'}x1y2z"}}
