"""What a cluster lacks for a job: each thing that `submit` and the pods rely on, with its fix.

Nothing is changed, but for a short Job of the probe: the API server is asked, and lets go of what
it has checked (dry runs).
"""

import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from gptddp.errors import ClusterError, ConfigError
from gptddp.k8s.act import (
    companion,
    doctor_nodes,
    doctor_place,
    needs,
    share_probe,
    submit,
)
from gptddp.k8s.act.failure import REFUSED
from gptddp.k8s.act.patient import FAIL, OK, WARN, Check, Patient
from gptddp.k8s.cluster import INSTALL_OPERATOR, JOB, group_and_plural
from gptddp.k8s.objects import QUEUE, worker_pod_spec
from gptddp.k8s.observe.watcher import Say

_OLDEST_MINOR = 27  # of Kubernetes 1: of a PodDisruptionBudget's unhealthyPodEvictionPolicy
_OPERATOR = "control-plane=kubeflow-training-operator"
_AT_ONCE = 8  # questions
_REFUSED = "change the option, or the policy or quota of the namespace, that the message names"
Look = Callable[[Patient], Iterable[Check]]


def examine(patient: Patient, probe: Say | None = None) -> Iterator[Check]:
    """All checks, in the order in which to mend what they find; without a server only the first.

    probe: also try the volume with two pods, which is told what is done.

    One that the server does not answer is a check that warns, or fails, with its words.
    """
    looks = [("api", _api), *_LOOKS]
    if probe:
        looks.append(("probe", functools.partial(share_probe.probe, say=probe)))
    for id, look in looks:
        answers = list(_asked(id, look, patient))
        yield from answers
        if id == "api" and any(check.status == FAIL for check in answers):
            return


def _asked(
    id: str, look: Callable[[Patient], Iterable[Check]], patient: Patient
) -> Iterator[Check]:
    try:
        yield from look(patient)
    except ClusterError as error:
        what, _, fix = str(error).partition("; ")
        if error.status == 403 and " cannot " in what:
            yield Check(id, WARN, f"cannot be seen: {what}", fix or "ask somebody who may see it")
        elif error.status in REFUSED:
            yield Check(id, FAIL, f"refused: {what}", fix or _REFUSED)
        else:
            fix = fix or "look at the API server's message, and try again"
            yield Check(id, FAIL, what, fix)


# -- the server and the operator -----------------------------------------------------------------


def _api(patient: Patient) -> Iterator[Check]:
    info = patient.cluster.ask("/version")
    version = str(info.get("gitVersion", "of unknown version"))
    found = re.match(r"v1\.(\d+)", version)
    if found and int(found[1]) < _OLDEST_MINOR:
        fix = f"use Kubernetes 1.{_OLDEST_MINOR} or newer, or --without poddisruptionbudget"
        yield Check("api", WARN, f"Kubernetes {version} is old", fix)
    else:
        yield Check("api", OK, f"Kubernetes {version}, namespace {patient.cluster.namespace}")


def _namespace(patient: Patient) -> Iterator[Check]:
    name = patient.cluster.namespace
    try:
        found = patient.cluster.ask(f"/api/v1/namespaces/{name}")
    except ClusterError as error:
        if error.status != 404:
            raise
        fix = f"`kubectl create namespace {name}`, or name another with -n"
        yield Check("namespace", FAIL, f"there is no namespace {name}", fix)
        return
    if "deletionTimestamp" in found["metadata"]:
        yield Check("namespace", FAIL, f"{name} is being deleted", "name another with -n")
        return
    labels = found["metadata"].get("labels") or {}
    level = labels.get("pod-security.kubernetes.io/enforce", "none enforced")
    yield Check("namespace", OK, f"{name}, Pod Security: {level}")


def _crd(patient: Patient) -> Iterator[Check]:
    try:
        found = patient.cluster.ask("/apis/kubeflow.org/v1")
    except ClusterError as error:
        if error.status != 404:
            raise
        found = {}
    if any(it["name"] == "pytorchjobs" for it in found.get("resources") or []):
        yield Check("crd", OK, "the API server knows PyTorchJobs (kubeflow.org/v1)")
    else:
        yield Check("crd", FAIL, "the API server knows no PyTorchJobs", INSTALL_OPERATOR)


def _operator(patient: Patient) -> Iterator[Check]:
    found = patient.items("/apis/apps/v1/deployments", {"labelSelector": _OPERATOR})
    if not found:
        text = f"no Deployment has the label {_OPERATOR}, by which the operator is installed"
        yield Check(
            "operator", WARN, text, f"is it there under another name? Else {INSTALL_OPERATOR}"
        )
    for it in found:
        where = f"{it['metadata']['namespace']}/{it['metadata']['name']}"
        image = it["spec"]["template"]["spec"]["containers"][0].get("image", "")
        if not (it.get("status") or {}).get("availableReplicas"):
            fix = f"`kubectl describe deployment {it['metadata']['name']} -n "
            fix += f"{it['metadata']['namespace']}` says why"
            yield Check("operator", FAIL, f"{where} has no pod that is ready", fix)
        else:
            yield Check("operator", OK, f"{where} is ready ({image.rpartition('/')[2]})")


def _webhook(patient: Patient) -> Iterator[Check]:
    """A dry run of the job, and of one that the operator's webhook has to refuse."""
    cluster, job = patient.cluster, patient.job
    try:
        submit.refuse(cluster, job)
    except ClusterError as error:
        if " cannot create resource " in str(error):
            return  # said by the rights
        raise
    wrong = copy.deepcopy(job)
    wrong["metadata"]["name"] += "-doctor"
    worker_pod_spec(wrong)["containers"][0]["name"] = "wrong"
    try:
        cluster.create(wrong, dry_run=True)
    except ClusterError:
        yield Check("webhook", OK, "the job is taken, and a wrong one refused (dry runs)")
        return
    text = "a job with a mistake is taken: the operator's webhook does not look at it"
    fix = "`kubectl get validatingwebhookconfigurations` has to list that of the training operator"
    yield Check("webhook", WARN, text, fix)


# -- what this user may do -----------------------------------------------------------------------

_JOBS, _BATCH_JOBS = group_and_plural(JOB), group_and_plural("Job")
_GONE = ("list", "delete")
Right = tuple[str, str, str]  # verb, API group, resource


def rights(patient: Patient) -> dict[str, list[Right]]:
    """What each command asks the API server for."""
    beside = [group_and_plural(it["kind"]) for it in patient.helpers]
    queue = QUEUE in (patient.job["metadata"].get("labels") or {})
    workloads = group_and_plural("Workload")
    looks: list[Right] = [("get", *_JOBS), ("list", "", "pods")]
    gone: list[Right] = [("list", "", "pods"), ("list", "", "services")]
    return {
        "submit": [
            *((verb, *_JOBS) for verb in ("get", "create")),
            *((verb, *kind) for kind in beside for verb in ("get", "create", "patch")),
            ("get", "", "persistentvolumeclaims"),
            *gone,
        ],
        "a signed rendezvous": [(verb, "", "secrets") for verb in ("get", "create", "patch")],
        "status, wait, top": looks,
        **({"why a job is queued": [("list", *workloads)]} if queue else {}),
        "why a job does not run": [("list", "", "events")],
        "list": [("list", *_JOBS), ("list", "", "pods")],
        "logs": [*looks, ("get", "", "pods"), ("get", "", "pods/log")],
        "scale, suspend, resume": [
            *(("get", *_JOBS), ("patch", *_JOBS)),
            *([("list", *workloads), ("patch", *workloads)] if queue else []),
        ],
        "delete": [
            *((verb, *_JOBS) for verb in ("get", "delete")),
            *((verb, *kind) for kind in [*beside, _BATCH_JOBS] for verb in _GONE),
            *gone,
        ],
        "prepare, sample": [
            *((verb, *_BATCH_JOBS) for verb in ("get", "create", "delete")),
            *looks,
            ("get", "", "pods/log"),
        ],
    }  # fmt: skip


_NEEDED = ("submit", "status, wait, top")  # without the others a job can be run


def _rights(patient: Patient) -> Iterator[Check]:
    wanted = rights(patient)
    questions = list(dict.fromkeys(right for of in wanted.values() for right in of))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answers = pool.map(lambda right: _may(patient, right), questions)
        allowed = dict(zip(questions, answers, strict=True))
    for command, of in wanted.items():
        lacking = [f"{verb} {_full(group, name)}" for verb, group, name in of
                   if not allowed[verb, group, name]]  # fmt: skip
        if lacking:
            status = FAIL if command in _NEEDED else WARN
            text = f"{command}: no right to {', '.join(lacking)}"
            fix = f"ask for a Role in {patient.cluster.namespace} that has them"
            yield Check("rights", status, text, fix)
    fine = [command for command, of in wanted.items() if all(allowed[right] for right in of)]
    if fine:
        yield Check("rights", OK, f"for {', '.join(fine)}")


def _full(group: str, name: str) -> str:
    return f"{name}.{group}" if group else name


def _may(patient: Patient, right: Right) -> bool:
    verb, group, name = right
    resource, _, part = name.partition("/")
    asked = {"namespace": patient.cluster.namespace, "verb": verb, "group": group}
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": {**asked, "resource": resource, "subresource": part}},
    }
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    return bool((patient.cluster.ask(path, body=review).get("status") or {}).get("allowed"))


def _pod(patient: Patient) -> Iterator[Check]:
    """A dry run of one pod: Pod Security, LimitRanges, quotas and other admission."""
    if not _may(patient, ("create", "", "pods")):
        fix = "none is needed: submit does without; who may create pods can try"
        yield Check("pod", OK, "not tried: you have no right to create pods", fix)
        return
    said: list[str] = []
    submit.check_pod(patient.cluster, patient.job, patient.helpers, said.append)
    for text in said:
        yield Check("pod", FAIL, text.removeprefix("warning: "), _REFUSED)
    if not said:
        yield Check("pod", OK, "the namespace admits a pod of the job (dry run)")


def _beside(patient: Patient) -> Iterator[Check]:
    """Dry runs of what goes with the job, which a quota or a policy may refuse."""
    for helper in patient.helpers:
        try:
            companion.apply(patient.cluster, helper, dry_run=True)
        except ConfigError as error:
            yield Check("beside", FAIL, str(error), "use another --name")
        except ClusterError as error:
            what, _, fix = str(error).partition("; or ")
            if " cannot " not in what:  # said by the rights
                yield Check("beside", FAIL, f"refused: {what}", fix or _REFUSED)


def _named(patient: Patient) -> Iterator[Check]:
    """Secrets, ConfigMaps and the account that the pods name, and nobody makes for them."""
    for lack in needs.references(patient.cluster, patient.pod_spec, patient.helpers):
        yield Check("named", FAIL if lack.fatal else WARN, lack.text, lack.fix)


def summary(checks: Sequence[Check]) -> str:
    """`2 failed, 1 to look at`."""
    count: dict[str, Any] = {s: sum(it.status == s for it in checks) for s in (FAIL, WARN)}
    return (
        f"{count[FAIL]} failed, {count[WARN]} to look at" if any(count.values()) else "all is well"
    )


_LOOKS: tuple[tuple[str, Look], ...] = (
    ("namespace", _namespace),
    ("crd", _crd),
    ("operator", _operator),
    ("rights", _rights),
    ("webhook", _webhook),
    ("beside", _beside),
    ("named", _named),
    ("pod", _pod),
    ("volumes", doctor_place.volumes),
    ("quota", doctor_place.quota),
    ("nodes", doctor_nodes.nodes),
    ("image", doctor_nodes.image),
    ("queue", doctor_place.queue),
    ("network", doctor_place.network),
)
