"""The rules of a job's numbers: pods, processes, GPUs, CPUs, memory, time, ports.

Each blames the option that is wrong, and not one that was computed from it.
"""

from collections.abc import Iterator

from gptddp import config
from gptddp.k8s.render import names, quantity
from gptddp.k8s.render.problem import Found
from gptddp.k8s.render.spec import RENDEZVOUS_PORT, JobSpec, flag, sizes
from gptddp.k8s.render.spec_rule import spec_rule

_MOST_CPUS = 1024
_MEMORY = (2**26, 2**60)  # bytes of a pod; less is a unit forgotten, more no machine has
_MOST_GRACE_S = 24 * 3600


@spec_rule
def _pods(spec: JobSpec) -> Iterator[Found]:
    """1 <= min <= replicas <= max."""
    low, count, high = spec.min or 0, spec.replicas, spec.max or 0
    if count < 1:
        yield ("--replicas", f"{count} is less than 1", "use --replicas 1 or more")
        return
    some = f"use --min 1 to {count}" if count > 1 else "use --min 1"
    if low < 1:
        yield ("--min", f"{low} is less than 1", some)
    if low > count:
        yield ("--min", f"{low} is above --replicas {count}", some)
    if high < count:
        fix = f"use --max {count} or more, or fewer --replicas"
        yield ("--max", f"{high} is less than --replicas {count}", fix)


@spec_rule
def _processes_per_pod(spec: JobSpec) -> Iterator[Found]:
    """A pod has one worker process at least."""
    if (nproc := spec.nproc_per_node or 0) < 1:
        yield ("--nproc-per-node", f"{nproc} is less than 1", "use 1 or more, or leave it out")


@spec_rule
def _world_size(spec: JobSpec) -> Iterator[Found]:
    """Every worker needs a lane of its own."""
    lanes = config.with_preset(spec.train, accelerator=spec.gpus > 0).lanes
    pods, nproc = spec.max or 0, spec.nproc_per_node or 0
    if min(pods, nproc) < 1 or pods * nproc <= lanes:
        return
    if nproc > lanes:
        of = "--gpus" if nproc == spec.gpus else "--nproc-per-node"
        fewer = f"use {of} {lanes} or less"
    else:
        of = "--max" if pods > spec.replicas else "--replicas"
        fewer = f"use {of} {lanes // nproc} or less"
    batch = spec.train.batch
    more = f"-- --lanes {pods * nproc}"
    if batch and batch % (pods * nproc):
        more += f" --batch {-(-batch // (pods * nproc)) * pods * nproc}"
    product = f" ({pods} pods of {nproc})" if min(pods, nproc) > 1 else ""
    rule = f"{pods * nproc} workers{product} but only {lanes} lanes: every worker needs one"
    yield (of, rule, f"{fewer}, or give a new run more lanes: {more}")


@spec_rule
def _gpus(spec: JobSpec) -> Iterator[Found]:
    """GPUs are whole, not negative, and one process each at most."""
    if spec.gpus < 0:
        yield ("--gpus", f"{spec.gpus} is negative", "use 0 or more")
    if 0 < spec.gpus < (spec.nproc_per_node or 1):
        yield (
            "--nproc-per-node",
            f"{spec.nproc_per_node} processes share {spec.gpus} GPUs",
            f"use --nproc-per-node {spec.gpus} or less: NCCL wants a GPU for each",
        )
    if not names.is_resource(spec.gpu_resource):
        yield (
            "--gpu-resource",
            f"{spec.gpu_resource!r} is not <domain>/<resource>",
            "use a name as in nvidia.com/gpu",
        )


@spec_rule
def _quantity(spec: JobSpec) -> Iterator[Found]:
    """CPU and memory are quantities that a machine can have, and memory holds /dev/shm."""
    found = [
        *amount("--cpu", spec.cpu or ""),
        *amount("--memory", spec.memory or ""),
        *amount("--shm", spec.shm or ""),
    ]
    yield from found
    if not found and quantity.number(spec.shm) >= quantity.number(spec.memory):
        yield (
            "--memory",
            f"{spec.memory} is not more than --shm {spec.shm}",
            "raise it: what lies in /dev/shm counts against the pod's memory",
        )


def amount(option: str, text: str) -> Iterator[Found]:
    """What is wrong with the CPUs or the bytes that an option names."""
    value = quantity.parse(text)
    cpu = option == "--cpu"
    if not value:
        fix = f"use one such as {'500m or 2' if cpu else '4Gi'}"
        yield (option, f"{text!r} is not a positive Kubernetes quantity", fix)
    elif cpu and not 0.001 <= value <= _MOST_CPUS:
        rule = f"{text} is {value:.10g} CPUs"
        yield (option, rule, f"use a number of cores, as 2 or 500m, up to {_MOST_CPUS}")
    elif not cpu and value < _MEMORY[0]:
        rule = f"{text} is {value:.10g} bytes, too few for any process"
        yield (option, rule, "use one such as 4Gi or 512Mi")
    elif not cpu and value > _MEMORY[1]:
        yield (option, f"{text} is more than any machine has", "use one such as 4Gi")


@spec_rule
def _grace(spec: JobSpec) -> Iterator[Found]:
    """Ten seconds to a day: less cannot hold a step and a checkpoint."""
    if spec.grace_s < 10:
        rule = f"{spec.grace_s} s is not enough to commit a checkpoint"
        yield ("--grace-s", rule, "use at least 10")
    if spec.grace_s > _MOST_GRACE_S:
        rule = f"{spec.grace_s} s would hold up every end of a pod"
        yield ("--grace-s", rule, f"use at most {_MOST_GRACE_S}, a day")


@spec_rule
def _metrics_port(spec: JobSpec) -> Iterator[Found]:
    """The metrics have a port of their own."""
    if spec.train.metrics_port == RENDEZVOUS_PORT:
        rule = f"{RENDEZVOUS_PORT} is the port of the rendezvous"
        yield ("--metrics-port after --", rule, "use another, such as 9464, or 0 for none")


def warnings(spec: JobSpec) -> list[str]:
    """Sizes that are less than what the model is expected to need; one line each."""
    nproc = max(1, spec.nproc_per_node or 1)
    shm, memory = sizes(spec, nproc)
    notes = []
    if _less(spec.shm, shm):
        notes.append(
            f"--shm {spec.shm} cannot hold two snapshots of this model: after a fault the job goes "
            f"back to its last checkpoint; use --shm {shm}, or leave it out"
        )
    if _less(spec.memory, memory):
        of = f"{nproc} processes" if nproc > 1 else "a process"
        notes.append(
            f"--memory {spec.memory} is less than the {memory} that {of} of this model may need: "
            f"the pods may be killed for it; use {flag('memory')} {memory}, or leave it out"
        )
    return notes


def _less(given: str | None, wanted: str) -> bool:
    return quantity.number(given) < quantity.number(wanted)
