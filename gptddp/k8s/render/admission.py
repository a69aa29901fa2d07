"""What the training operator (v1.9) refuses in a PyTorchJob, and what it lets through though it
cannot work: such a job hangs, or fails without a word in its status.

The object is checked, so that any manifest can be, not only a rendered one. Messages name the
object's field; the fix names the flag of `gptddp-k8s` where there is one.
"""

from collections.abc import Iterator
from typing import Any

from gptddp.k8s.objects import Object, replica_count, replica_specs, volume_claims
from gptddp.k8s.render import names
from gptddp.k8s.render import queue_rules as _registered  # noqa: F401
from gptddp.k8s.render.problem import JOB_RULES, REPLICAS, Found, Problem, job_rule


def check_job(job: Object) -> list[Problem]:
    """Every broken rule of a PyTorchJob. One that a rule cannot read breaks `shape`."""
    found: list[Problem] = []
    for id, judge in JOB_RULES.items():
        try:
            found += [Problem(id, *it) for it in judge(job)]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            rule = f"not shaped like a PyTorchJob ({type(error).__name__}: {error})"
            return [Problem("shape", "manifest", rule, "compare it with `gptddp-k8s render`")]
    return found


def _elastic(job: Object) -> Object | None:
    policy: Object | None = job["spec"].get("elasticPolicy")
    return policy


def worker_count(job: Object) -> int:
    """The workers that the job asks for; 1 for an entry that is not there."""
    return replica_count(replica_specs(job).get("Worker", {}))


def _limits(job: Object) -> tuple[int, int]:
    """elasticPolicy's (min, max) with the operator's defaults: one for the other, else replicas."""
    policy, count = _elastic(job) or {}, worker_count(job)
    low, high = policy.get("minReplicas"), policy.get("maxReplicas")
    known = [int(n) for n in (low, high) if n is not None] or [count]
    return known[0], known[-1]


@job_rule
def _name(job: Object) -> Iterator[Found]:
    """The job's name is a DNS-1035 label, and so are its pods' names."""
    name = str(job["metadata"]["name"])
    if not (names.is_label(name) and name[0].isalpha()):
        yield (
            "metadata.name",
            f"{name!r} is not a DNS-1035 label",
            "use lower case letters, digits and '-', with a letter first (--name)",
        )
        return
    last = max(worker_count(job), _limits(job)[1], 1) - 1
    suffix = f"-worker-{last}"
    if len(name) + len(suffix) > 63:  # the operator creates the pods, then fails on the services
        yield (
            "metadata.name",
            f"the pod name {name}{suffix} is longer than 63 characters",
            f"use at most {63 - len(suffix)} characters (--name)",
        )


@job_rule
def _replica_types(job: Object) -> Iterator[Found]:
    """Master (exactly one) and Worker, and Worker-only jobs are elastic."""
    specs = replica_specs(job)
    for key in specs:
        if key not in ("Master", "Worker"):
            yield (f"{REPLICAS}.{key}", "unknown", "use Master or Worker as the key")
    if "Master" in specs and specs["Master"].get("replicas") != 1:
        yield (f"{REPLICAS}.Master.replicas", "must be 1", "write 1")
    if _elastic(job) is not None and "Worker" not in specs:
        yield ("spec.elasticPolicy", "needs a Worker entry", "add the entry Worker")
    if not specs:
        yield (REPLICAS, "is empty", "add the entry Worker")
    if "Master" not in specs and _elastic(job) is None and worker_count(job) > 1:
        yield (
            "spec.elasticPolicy",
            "a Worker-only job without it gets no rendezvous and hangs",
            "add elasticPolicy, also at a fixed size",
        )


@job_rule
def _replica_count(job: Object) -> Iterator[Found]:
    """1 <= min <= replicas <= max; the operator checks the first part of it only."""
    count, (low, high) = worker_count(job), _limits(job)
    where = f"{REPLICAS}.Worker.replicas"
    if "Worker" in replica_specs(job) and count < 1:
        yield (where, f"{count} is less than 1", "use 1 or more (--replicas)")
    elif _elastic(job) is not None:
        if low < 1:
            yield (
                "spec.elasticPolicy.minReplicas",
                f"{low} is less than 1",
                "use 1 or more (--min)",
            )
        elif low > high:
            yield (
                "spec.elasticPolicy.minReplicas",
                f"{low} is above maxReplicas {high}",
                f"use {high} or less (--min)",
            )
        elif not low <= count <= high:
            yield (
                where,
                f"{count} is not within minReplicas {low} and maxReplicas {high}",
                f"use {low} to {high} (--replicas), or change minReplicas or maxReplicas",
            )


@job_rule
def _processes(job: Object) -> Iterator[Found]:
    """nprocPerNode is a string with a number, given once."""
    spec, policy = job["spec"], _elastic(job) or {}
    value = spec.get("nprocPerNode", "auto")
    if "nprocPerNode" in spec and "nProcPerNode" in policy:
        yield (
            "spec.elasticPolicy.nProcPerNode",
            "must not be used with nprocPerNode",
            "leave it out: it is deprecated",
        )
    number = isinstance(value, str) and value.isdigit() and int(value) > 0
    if not number and value not in ("auto", "cpu", "gpu"):
        yield (
            "spec.nprocPerNode",
            f"{value!r} is not a positive number as a string",
            'write "1" or more, in quotes (--nproc-per-node)',
        )


@job_rule
def _choices(job: Object) -> Iterator[Found]:
    """Values that the API takes as free text."""
    run_policy = job["spec"].get("runPolicy") or {}
    checks: list[tuple[str, Any, tuple[str, ...]]] = [
        (
            f"{REPLICAS}.{key}.restartPolicy",
            replica.get("restartPolicy", "OnFailure"),
            ("Always", "OnFailure", "Never", "ExitCode"),
        )
        for key, replica in replica_specs(job).items()
    ]
    checks += [
        (
            "spec.runPolicy.cleanPodPolicy",
            run_policy.get("cleanPodPolicy", "None"),
            ("None", "Running", "All"),
        ),
        (
            "spec.runPolicy.managedBy",
            run_policy.get("managedBy", "kubeflow.org/training-operator"),
            ("kubeflow.org/training-operator", "kueue.x-k8s.io/multikueue"),
        ),
        (
            "spec.elasticPolicy.rdzvBackend",
            (_elastic(job) or {}).get("rdzvBackend", "c10d"),
            ("c10d", "etcd", "etcd-v2"),
        ),
    ]
    for where, value, allowed in checks:
        if value not in allowed:
            yield (where, f"{value!r} is unknown", f"use {' or '.join(allowed)}")


@job_rule
def _rendezvous(job: Object) -> Iterator[Found]:
    """What makes the operator or torchrun crash."""
    policy = _elastic(job) or {}
    if policy.get("rdzvConf") == []:
        yield (
            "spec.elasticPolicy.rdzvConf",
            "an empty list makes the operator panic",
            "leave it out or fill it",
        )
    if policy.get("standalone"):
        yield (
            "spec.elasticPolicy.standalone",
            "torchrun fails on what it is set to",
            "leave it out",
        )


@job_rule
def _numbers(job: Object) -> Iterator[Found]:
    """Nothing counts below zero."""
    run_policy, policy = job["spec"].get("runPolicy") or {}, _elastic(job) or {}
    for where, table, keys in (
        (
            "runPolicy",
            run_policy,
            ("backoffLimit", "ttlSecondsAfterFinished", "activeDeadlineSeconds"),
        ),
        ("elasticPolicy", policy, ("maxRestarts",)),
    ):
        for key in keys:
            if table.get(key) is not None and int(table[key]) < 0:
                yield (f"spec.{where}.{key}", "is negative", "use 0 or more")


@job_rule
def _claims(job: Object) -> Iterator[Found]:
    """A pod has a claim in one volume: for a second one the kubelet waits for ever."""
    for key, replica in replica_specs(job).items():
        found = list(volume_claims(replica["template"]["spec"]))
        for number, (name, claim) in enumerate(found):
            first = next((one for one, other in found[:number] if other == claim), None)
            if first is not None:
                yield (
                    f"{REPLICAS}.{key}.template.spec.volumes[{name}]",
                    f"the claim {claim} is in the volume {first} already, and the pod would hang",
                    f"leave it out, and mount {first} twice",
                )


@job_rule
def _containers(job: Object) -> Iterator[Found]:
    """A container named `pytorch`, images, named ports."""
    for key, replica in replica_specs(job).items():
        where = f"{REPLICAS}.{key}.template.spec.containers"
        containers = replica["template"]["spec"].get("containers") or []
        if "pytorch" not in [c.get("name") for c in containers]:
            yield (where, "none is named 'pytorch'", "name one so")
        for container in containers:
            yield from _container(f"{where}[{container.get('name')}]", container)


def _container(where: str, container: Object) -> Iterator[Found]:
    if not container.get("image"):
        yield (f"{where}.image", "is missing", "add it (--image)")
    ports = container.get("ports") or []
    for key in ("name", "containerPort"):
        found = [(port.get(key), port.get("protocol", "TCP")) for port in ports if port.get(key)]
        if double := next((it for it in found if found.count(it) > 1), None):
            rule = f"{double[0]} is the {key} of two ports, which breaks the job's Service"
            yield (f"{where}.ports", rule, "give each port its own")
    if any(not port.get("name") for port in ports):
        yield (
            f"{where}.ports",
            "a nameless port breaks the job's Service",
            "name every port",
        )
