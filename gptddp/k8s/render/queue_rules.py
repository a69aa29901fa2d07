"""What Kueue refuses in a PyTorchJob, and what it takes though it does not do what was meant.

As Kueue 0.14 has it: a job is in a queue by a label of its own, the whole of it is admitted or
nothing, and one whose pods become more or fewer while it runs is stopped and queued anew.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gptddp.k8s.objects import PRIORITY, QUEUE, Object, replica_specs
from gptddp.k8s.render import names
from gptddp.k8s.render.problem import REPLICAS, Found, job_rule
from gptddp.k8s.render.queueing import TOPOLOGY, UNCONSTRAINED, topology
from gptddp.k8s.render.spec_rule import spec_rule

if TYPE_CHECKING:
    from gptddp.k8s.render.spec import JobSpec

_ELASTIC = "kueue.x-k8s.io/elastic-job"  # annotation
_MAX_TIME = "kueue.x-k8s.io/max-exec-time-seconds"  # label


@spec_rule
def _queue_options(spec: "JobSpec") -> Iterator[Found]:
    """What Kueue is to know of a job is given with its queue, and can be read."""
    for option in ("priority", "topology"):
        if getattr(spec, option) is not None and spec.queue is None:
            fix = "add --queue NAME; `kubectl get localqueues` lists them"
            yield f"--{option}", "it is Kueue's, and the job is in no queue of it", fix
    if spec.topology is not None and topology(spec.topology) is None:
        yield (
            "--topology",
            f"{spec.topology!r} cannot be read",
            f"use required=LABEL or preferred=LABEL with a label of nodes, or {UNCONSTRAINED}",
        )
    for key, _value in spec.pod.label:
        if key in (QUEUE, PRIORITY):
            option = "--queue" if key == QUEUE else "--priority"
            yield f"--label {key}", "has an option of its own", f"use {option}"


@job_rule
def _queue(job: Object) -> Iterator[Found]:
    """The queue is a label of the job, which names an object."""
    labels = job["metadata"].get("labels") or {}
    for key, option in ((QUEUE, "--queue"), (PRIORITY, "--priority")):
        if key in labels and not (names.is_subdomain(labels[key]) and names.is_value(labels[key])):
            yield (
                f"metadata.labels[{key}]",
                f"{labels[key]!r} is not the name of an object",
                f"use {option} with up to 63 lower case letters, digits, '-' and '.'",
            )
    for role, replica in replica_specs(job).items():
        on_pods = (replica["template"].get("metadata") or {}).get("labels") or {}
        if QUEUE in on_pods and QUEUE not in labels:
            yield (
                f"{REPLICAS}.{role}.template.metadata.labels[{QUEUE}]",
                "Kueue takes a job by the job's own labels, and would queue each pod for itself",
                "move it to metadata.labels",
            )


@job_rule
def _queue_size(job: Object) -> Iterator[Found]:
    """The number of pods of a job in a queue stays as it is while the job runs."""
    labels = job["metadata"].get("labels") or {}
    if _ELASTIC in (job["metadata"].get("annotations") or {}):
        yield (
            f"metadata.annotations[{_ELASTIC}]",
            "Kueue scales batch Jobs and Ray's kinds in place, and no PyTorchJob",
            "leave it out",
        )
    if QUEUE in labels and (job["spec"].get("elasticPolicy") or {}).get("metrics"):
        yield (
            "spec.elasticPolicy.metrics",
            "an autoscaler would change the number of pods, and Kueue stops the job each time",
            f"leave it out, or the label {QUEUE}",
        )


@job_rule
def _queue_time(job: Object) -> Iterator[Found]:
    """Kueue's time limit is in whole seconds."""
    text = (job["metadata"].get("labels") or {}).get(_MAX_TIME)
    if text is not None and not re.fullmatch(r"0*[1-9][0-9]{0,8}", str(text)):
        yield (
            f"metadata.labels[{_MAX_TIME}]",
            f"{text!r} is not a number of seconds",
            "use 1 or more",
        )


@job_rule
def _queue_topology(job: Object) -> Iterator[Found]:
    """One wish for the nodes of the pods at most, which names a label of nodes."""
    for role, replica in replica_specs(job).items():
        where = f"{REPLICAS}.{role}.template.metadata.annotations"
        given = (replica["template"].get("metadata") or {}).get("annotations") or {}
        found = [key for key in TOPOLOGY.values() if key in given]
        if len(found) > 1:
            yield where, f"Kueue takes one of {' and '.join(found)}", "leave the others out"
        for key in found:
            value = str(given[key])
            if key == TOPOLOGY[UNCONSTRAINED]:
                if value not in ("true", "false"):
                    yield f"{where}[{key}]", f"{value!r} is neither true nor false", "write 'true'"
            elif not names.is_key(value):
                rule = f"{value!r} is not the key of a label of nodes"
                yield f"{where}[{key}]", rule, "use --topology with one as in example.com/rack"
