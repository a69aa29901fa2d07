"""Every check of a job before it leaves this machine: each with an id, a message and a fix.

`check_spec` judges what the user gave; `admission` judges any PyTorchJob as the operator would, and
refuses what the operator should refuse but does not.
"""

import re
from collections.abc import Iterator

from gptddp import config
from gptddp.advice import advice
from gptddp.errors import ConfigError
from gptddp.k8s.render import names, pod, size_rules
from gptddp.k8s.render import pod_rules as _registered  # noqa: F401
from gptddp.k8s.render import queue_rules as _registered_too  # noqa: F401
from gptddp.k8s.render.problem import Found, Problem
from gptddp.k8s.render.spec import JobSpec, flag
from gptddp.k8s.render.spec_rule import SPEC_RULES, spec_rule


def check_spec(spec: JobSpec) -> list[Problem]:
    """Every broken rule of a resolved spec, in a fixed order."""
    return [Problem(id, *found) for id, rule in SPEC_RULES.items() for found in rule(spec)]


def refuse(problems: list[Problem]) -> None:
    """Raise ConfigError that lists the problems, one a line; nothing if there is none."""
    if problems:
        raise ConfigError("\n".join(map(str, problems)))


@spec_rule
def _places(spec: JobSpec) -> Iterator[Found]:
    """The job decides where data and runs lie in its pods."""
    if spec.train.data:
        yield (
            "--data after --",
            "the job mounts the dataset itself",
            "name its claim before the --, as --data CLAIM/PATH, or `data` under [job]",
        )
    if spec.train.run_dir:
        yield (
            "--run-dir after --",
            "the job's run directory is /runs/<name>",
            "use --name to name the job and its run, and --runs for the claim",
        )


@spec_rule
def _init_from(spec: JobSpec) -> Iterator[Found]:
    """The pods see the volumes of data and runs alone, but for those that a patch gives them."""
    path = spec.train.init_from or ""
    roots = "/" if spec.pod.patch else ("/data/", "/runs/")
    if path and (not path.startswith(roots) or ".." in path.split("/")):
        yield (
            f"--init-from {path} after --",
            "the pods have the claim of --data at /data, and that of --runs at /runs",
            "put the folder into one of them, and name it there, as in /data/models/gpt2",
        )


@spec_rule
def _device(spec: JobSpec) -> Iterator[Found]:
    """A pod without a GPU has no CUDA."""
    if spec.train.device == "cuda" and spec.gpus < 1:
        yield ("--device cuda", "the pods have no GPU", "add --gpus 1")


@spec_rule
def _volumes(spec: JobSpec) -> Iterator[Found]:
    """Claims are DNS-1123 names; a path inside one is relative and stays in it."""
    yield from claim_path("--data", spec.claim, spec.data_path)
    yield from claim_path("--runs", spec.runs_claim, spec.runs_path)


def claim_path(option: str, claim: str, path: str = "") -> Iterator[Found]:
    """What is wrong with a claim, and a path in it, that an option names."""
    if not names.is_subdomain(claim):
        yield (
            option,
            f"{claim!r} is not the name of a PersistentVolumeClaim",
            "use lower case letters, digits, '-' and '.'; a folder is for --volume",
        )
    if ".." in path.split("/"):
        yield (option, "the path leaves the claim", "name it without '..'")


@spec_rule
def _namespace(spec: JobSpec) -> Iterator[Found]:
    """A namespace is a DNS-1123 label."""
    if spec.namespace is not None and not names.is_label(spec.namespace):
        yield (
            "--namespace",
            f"{spec.namespace!r} is not a DNS label",
            "use up to 63 lower case letters, digits and '-'",
        )


@spec_rule
def _image(spec: JobSpec) -> Iterator[Found]:
    """An image is one that a node can pull."""
    if not names.is_image(spec.image):
        yield (
            "--image",
            f"{spec.image!r} is not an image reference",
            f"use one such as {names.near_image(spec.image)}",
        )


def _variables(spec: JobSpec) -> Iterator[tuple[str, str]]:
    """The environment variables that are given, each with its flag."""
    for name, _value in spec.env:
        yield f"--env {name}", name
    for field in ("env_from_secret", "env_from_configmap"):
        for text in getattr(spec.pod, field):
            match = re.fullmatch(pod.ENV_FROM, text)
            if match and match[1]:
                yield f"{flag(field)} {match[1]}", match[1]


@spec_rule
def _env_name(spec: JobSpec) -> Iterator[Found]:
    """A variable's name is one that every shell can read."""
    for where, name in _variables(spec):
        if not names.is_variable(name):
            yield where, "not the name of a variable", "use letters, digits and '_'"


@spec_rule
def _env_reserved(spec: JobSpec) -> Iterator[Found]:
    """No variable that the operator, the launcher or the manifest sets."""
    for where, name in _variables(spec):
        if names.is_reserved(name):
            fix = "leave it out: it would be overridden, or break the rendezvous"
            yield where, "the operator or the launcher sets it", fix


@spec_rule
def _env_secret(spec: JobSpec) -> Iterator[Found]:
    """A manifest is no place for secrets."""
    for name, value in spec.env:
        if names.is_secret(name, value):
            fix = f"put it into a Secret and use --env-from-secret {name}=SECRET/KEY"
            yield f"--env {name}", "looks like a secret, which anyone may read in a manifest", fix


def warnings(spec: JobSpec) -> list[str]:
    """What is allowed but seldom meant; one line each."""
    notes = []
    last = spec.image.rpartition("/")[2]
    if "@" not in last and (":" not in last or last.endswith(":latest")):
        notes.append(f"--image {spec.image} has no fixed tag: pods may run different code")
    if spec.gpus > 0 and spec.train.device == "cpu":
        notes.append("--device cpu leaves the pods' GPUs idle")
    notes += size_rules.warnings(spec)
    settings = config.with_preset(spec.train, accelerator=spec.gpus > 0)
    return notes + advice(settings, spec.replicas * max(1, spec.nproc_per_node or 1))
