"""From a JobSpec to a batch script for Slurm: a pure function, the same bytes for the same job.

A node takes the place of a pod. Slurm has folders where Kubernetes has claims, and a Python of
the user's where it has an image. What a requeued job goes on from is the run's, as everywhere.
"""

import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from gptddp.errors import ConfigError
from gptddp.k8s.render import names, pod, quantity, rules, slurm_script
from gptddp.k8s.render.manifest import training_args
from gptddp.k8s.render.problem import Found, Problem
from gptddp.k8s.render.spec import JobSpec, flag

LAUNCHERS = {"torchrun": "gptddp.launch", "srun": "gptddp.train"}  # the program of a task
_SLURM_ENV = re.compile(r"(SLURM|SBATCH|SRUN|SALLOC|SQUEUE|SCANCEL|SCONTROL)(D|CTLD)?_.*|BASH_ENV")
# Of Kubernetes, or of the pods alone.
_UNUSED = ("namespace", "image", "gpu_resource", "queue", "priority", "topology", "code")


@dataclass(frozen=True)
class Place:
    """What Slurm needs to know beside the job.

    launcher: `torchrun` (ours, a task a node) or `srun` (a task a rank); folders: of the claims;
    min: fewest nodes where the user has given it; python: the program on every node.
    """

    launcher: str = "torchrun"
    folders: Mapping[str, str] | None = None
    min: int | None = None
    python: str = "python"


def script(spec: JobSpec, place: Place) -> str:
    """The batch script of a resolved spec. Raises ConfigError with every broken rule."""
    rules.refuse(list(_problems(spec, place)))
    per_rank = place.launcher == "srun"
    program = [place.python, "-m", LAUNCHERS[place.launcher], *_program_args(spec, place)]
    names = {"PYTHON": place.python, "PROGRAM": program}
    return slurm_script.text(
        directives=_directives(spec, place),
        variables={"GPTDDP_GRACE_S": str(spec.grace_s), **dict(spec.env)},
        words={key: shlex.join([v] if isinstance(v, str) else v) for key, v in names.items()},
        tasks=_tasks(spec, place),
        cpus=_cpus(spec, place),
        workers=None if per_rank else _workers(spec),
    )


def unused(spec: JobSpec) -> list[str]:
    """What was given and has no meaning on Slurm; one line each."""
    default = JobSpec()
    given = [n for n in _UNUSED if getattr(spec, n) != getattr(default, n)]
    given += pod.given(spec.pod)
    notes = [f"{flag(name)} has no meaning with --api slurm: it is left out" for name in given]
    if (spec.max or 0) > spec.replicas:
        notes.append(
            f"--max {spec.max}: a job on Slurm cannot grow while it runs; --min N --replicas M "
            "lets Slurm choose the number of nodes at each start"
        )
    return notes


def _workers(spec: JobSpec) -> int:
    return max(1, spec.nproc_per_node or 1)


def _tasks(spec: JobSpec, place: Place) -> int:
    """The tasks of a node."""
    return _workers(spec) if place.launcher == "srun" else 1


def _cpus(spec: JobSpec, place: Place) -> int:
    """Whole CPUs of a task."""
    return max(1, math.ceil((quantity.parse(spec.cpu or "") or 1.0) / _tasks(spec, place)))


def _directives(spec: JobSpec, place: Place) -> list[str]:
    """The options for sbatch: `sbatch OPTION job.sbatch` overrides each of them."""
    few = f"{place.min}-" if place.min is not None and place.min < spec.replicas else ""
    mib = math.ceil(quantity.number(spec.memory) / 2**20)
    return [
        f"--job-name={spec.name}",
        "--output=%x-%j.out",
        "--open-mode=append",  # a requeued job goes on in the same file
        f"--nodes={few}{spec.replicas}",
        f"--ntasks-per-node={_tasks(spec, place)}",
        f"--cpus-per-task={_cpus(spec, place)}",
        f"--mem={mib}M",
        *([f"--gres=gpu:{spec.gpus}"] if spec.gpus > 0 else []),
        "--requeue",
        # to this script alone: `srun` takes SIGTERM for the end of the job, without a save
        f"--signal=B:TERM@{spec.grace_s}",
    ]


def _program_args(spec: JobSpec, place: Place) -> list[str]:
    data, runs = folder(spec.data, place), folder(spec.runs, place)
    # No port for metrics unless one is given: two jobs may share a node.
    return training_args(spec, data=data, run_dir=f"{runs}/{spec.name}", metrics_port=0)


def folder(volume: str, place: Place) -> str:
    """The folder of `/a/folder`, or of `CLAIM` or `CLAIM/PATH` with the folder of that claim."""
    if volume.startswith("/"):
        return volume.rstrip("/") or "/"
    claim, _, path = volume.partition("/")
    base = (place.folders or {}).get(claim)
    if base is None:
        raise ConfigError(
            f"{volume!r} is a PersistentVolumeClaim, which Slurm does not know; name its folder, "
            f"which all nodes share: --volume {claim or 'CLAIM'}=/FOLDER"
        )
    return "/".join(filter(None, [base.rstrip("/"), path.strip("/")])) or "/"


# -- rules ---------------------------------------------------------------------------------------


def _problems(spec: JobSpec, place: Place) -> Iterator[Problem]:
    """Every broken rule: those of any job but the claims', then Slurm's own."""
    yield from (p for p in rules.check_spec(spec) if p.id != "volumes")
    for id, found in (
        ("slurm-name", _name(spec)),
        ("slurm-grace", _grace(spec)),
        ("slurm-folders", _folders(spec, place)),
        ("slurm-env", _env(spec)),
        ("slurm-words", _words(spec, place)),
    ):
        yield from (Problem(id, *one) for one in found)


def _name(spec: JobSpec) -> Iterator[Found]:
    """The name is in a line for sbatch, in the log's name and in the run's."""
    if not names.is_label(spec.name):
        yield (
            "--name",
            f"{spec.name!r} is not a DNS label",
            "use up to 63 lower case letters, digits and '-'",
        )


def _grace(spec: JobSpec) -> Iterator[Found]:
    """sbatch refuses a longer time in --signal."""
    if spec.grace_s > 65535:
        yield ("--grace-s", f"{spec.grace_s} s is more than sbatch takes", "use at most 65535")


def _folders(spec: JobSpec, place: Place) -> Iterator[Found]:
    """Absolute, as the nodes have other working directories; and never out of a claim."""
    for claim, base in (place.folders or {}).items():
        if not base.startswith("/"):
            fix = "begin it with '/', and use a folder that all nodes share"
            yield (f"--volume {claim}", f"{base!r} is not an absolute path", fix)
    for name in ("data", "runs"):
        volume = getattr(spec, name)
        try:
            if ".." in folder(volume, place).split("/"):
                yield (f"--{name}", f"{volume!r} leads out of its folder", "name it without '..'")
        except ConfigError as error:
            what, _, fix = str(error).partition("; ")
            yield (f"--{name}", what, fix)


def _env(spec: JobSpec) -> Iterator[Found]:
    """Slurm's own variables decide what the job's commands do."""
    for name, _value in spec.env:
        if _SLURM_ENV.fullmatch(name):
            yield (f"--env {name}", "Slurm or the batch script sets it", "leave it out")


def _words(spec: JobSpec, place: Place) -> Iterator[Found]:
    """Quoting makes every printable character safe in the script; others have no use in it."""
    if not place.python or place.python.startswith("-"):
        yield ("--python", f"{place.python!r} is no program", "use python, or its absolute path")
    try:
        args = _program_args(spec, place)
    except ConfigError:  # `_folders` says it
        args = []
    yield from _unprintable("--python", [place.python])
    yield from _unprintable("trainer option", args)
    for name, value in spec.env:
        yield from _unprintable(f"--env {name}", [value])


def _unprintable(where: str, words: Iterable[str]) -> Iterator[Found]:
    for word in words:
        if not word.isprintable():
            yield (
                where,
                f"{word!r} has a line end or another control character",
                "use printable characters only",
            )
