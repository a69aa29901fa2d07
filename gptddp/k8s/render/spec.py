"""The job as its user states it: one frozen dataclass, from `job.toml` and flags.

Defaults < the `[job]` table < flags. `None` means "computed from the rest": see `resolve`, which
gives each such default its reason. The trainer's part is a `gptddp.config.Config`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptddp import __version__, config, flags, grid
from gptddp.config import Config
from gptddp.errors import ConfigError
from gptddp.flags import did_you_mean, name_of, read_toml
from gptddp.k8s.render import fields, forms, pod, problem, quantity
from gptddp.k8s.render.fields import FROM_DISK, TABLES, Kind, from_toml
from gptddp.k8s.render.fields import flag as flag  # here for all who ask about a spec
from gptddp.k8s.render.fields import option as _f
from gptddp.k8s.render.pod import PodOptions
from gptddp.model import shape

if TYPE_CHECKING:
    from gptddp.k8s.render.code import Code

RENDEZVOUS_PORT = 23456  # the operator's
_PARTS = ("pod", "train")  # fields that are dataclasses of their own


@dataclass(frozen=True)
class JobSpec:
    """Everything that decides a job's manifest. Every field is a flag and a key, the last two are
    options of their own."""

    name: str = _f("gptddp", "name of the job, of its pods <name>-worker-<i>, and of the run")
    namespace: str | None = _f(None, "namespace; by default the one of kubectl's context")
    image: str = _f(f"gptddp:{__version__}", "image whose entrypoint is `python -m gptddp.launch`")
    code: "Code | None" = _f(
        None, "folder whose Python files go before those of the image", Kind.CODE, "DIR"
    )
    replicas: int = _f(1, "pods to start with; the most there will be, without --max", Kind.NUMBER)
    min: int | None = _f(
        None, "fewest pods to train with [default: half of the replicas, rounded up]", Kind.NUMBER
    )
    max: int | None = _f(
        None, "most pods to train with, for scaling up later [default: replicas]", Kind.NUMBER
    )
    nproc_per_node: int | None = _f(
        None, "worker processes a pod [default: its GPUs, or 1]", Kind.NUMBER
    )
    cpu: str | None = _f(
        None,
        "CPUs a pod, request and limit [default: 1 a worker process, 3 with a GPU]",
        Kind.QUANTITY,
    )
    memory: str | None = _f(
        None,
        "memory a pod, request and limit, shm included [default: from the model's size]",
        Kind.QUANTITY,
    )
    gpus: int = _f(0, "GPUs a pod", Kind.NUMBER)
    gpu_resource: str = _f("nvidia.com/gpu", "resource name of a GPU, for other makers or slices")
    shm: str | None = _f(
        None, "size of /dev/shm, which NCCL uses [default: 1Gi with a GPU, or 256Mi]", Kind.QUANTITY
    )
    grace_s: int = _f(
        60, "seconds from SIGTERM to SIGKILL: time to commit a checkpoint", Kind.NUMBER
    )
    env: tuple[tuple[str, str], ...] = _f(
        (), "environment variable; may be repeated", Kind.TABLE, "NAME=VALUE"
    )
    data: str = _f("data", "claim with the dataset, read-only", metavar="CLAIM[/PATH]")
    runs: str = _f(
        "runs", "claim with the run directories, shared by all pods", metavar="CLAIM[/PATH]"
    )
    queue: str | None = _f(
        None, "LocalQueue of Kueue in which the job waits for its turn", metavar="NAME"
    )
    priority: str | None = _f(
        None, "WorkloadPriorityClass: the job's place in its queue", metavar="NAME"
    )
    topology: str | None = _f(
        None,
        "nodes that Kueue looks for: required=LABEL: with the same value of this label; "
        "preferred=LABEL; unconstrained",
        metavar="WISH",
    )
    pod: PodOptions = PodOptions()
    train: Config = Config()

    @property
    def claim(self) -> str:
        return self.data.partition("/")[0]

    @property
    def data_path(self) -> str:
        """Where the dataset lies inside its claim; empty for the claim's root."""
        return self.data.partition("/")[2].strip("/")

    @property
    def runs_claim(self) -> str:
        return self.runs.partition("/")[0]

    @property
    def run_path(self) -> str:
        """Where the run lies inside its claim."""
        return "/".join(filter(None, [self.runs_path, self.name]))

    @property
    def runs_path(self) -> str:
        return self.runs.partition("/")[2].strip("/")


FIELDS = {f.name: f for f in dataclasses.fields(JobSpec) if f.name not in _PARTS} | pod.FIELDS


def kind(name: str) -> Kind:
    """The kind of a field's value."""
    return fields.kind(FIELDS[name])


def load(file: Path | None, flags: Mapping[str, Any], train_args: Sequence[str]) -> JobSpec:
    """The resolved job of a file, flags (None: not given) and the trainer's arguments.

    As `given`, with every field filled that was left open.
    """
    return load_all(file, flags, train_args, {})[0]


def load_all(
    file: Path | None, flags: Mapping[str, Any], train_args: Sequence[str], swept: Mapping[str, str]
) -> list[JobSpec]:
    """A job for each run of a sweep, named by both, as `load` makes one. Raises ConfigError."""
    spec = given(file, flags, train_args)
    if spec.code is not None:
        _ = spec.code.archive  # what is wrong with it is said now
    runs = grid.configurations(swept, spec.train, train_args)
    named = {"-".join(filter(None, [spec.name, name])): train for name, train in runs.items()}
    return [resolve(dataclasses.replace(spec, name=it, train=c)) for it, c in named.items()]


def given(file: Path | None, flags: Mapping[str, Any], train_args: Sequence[str]) -> JobSpec:
    """The job as far as its user has stated it.

    Raises ConfigError for anything that cannot be read; `rules.check` judges what it means.
    """
    values = _job_table(file) if file else {}
    for name, value in flags.items():
        if value is None or value == ():
            continue
        if kind(name) in TABLES:
            value = {**values.get(name, {}), **dict(value)}
        if kind(name) in FROM_DISK:
            value = FROM_DISK[kind(name)](flag(name), value)
        values[name] = value
    values |= {n: tuple(sorted(v.items())) for n, v in values.items() if kind(n) in TABLES}
    problem.refuse(forms.problems(values))
    options = PodOptions(**{n: values.pop(n) for n in pod.FIELDS if n in values})
    return JobSpec(**values, pod=options, train=_train(file, train_args))


def resolve(spec: JobSpec) -> JobSpec:
    """Fill every field that was left open.

    - min: ceil(N/2): half of the pods train on while the rest come back. Two halves of a split
      network cannot both do so, as one alone gets the run's lease.
    - nproc_per_node: one process a GPU; "auto" would count the node's cores, not the pod's.
    - cpu: one a process, as one thread a rank is what a small model can use; 3 with a GPU, for
      its data threads, which still fits a node of four cores.
    - memory: see `memory_of`.
    """
    nproc = max(1, spec.nproc_per_node or spec.gpus)
    shm = spec.shm or ("1Gi" if spec.gpus > 0 else "256Mi")
    return dataclasses.replace(
        spec,
        shm=shm,
        min=math.ceil(spec.replicas / 2) if spec.min is None else spec.min,
        max=spec.replicas if spec.max is None else spec.max,
        nproc_per_node=nproc if spec.nproc_per_node is None else spec.nproc_per_node,
        cpu=str(nproc * (3 if spec.gpus > 0 else 1)) if spec.cpu is None else spec.cpu,
        memory=memory_of(spec, nproc, shm) if spec.memory is None else spec.memory,
    )


def memory_of(spec: JobSpec, nproc: int, shm: str | None) -> str:
    """The quantity for the pod's memory, which contains /dev/shm (`shm`).

    The training state is weights and two Adam moments in fp32, 12 bytes a parameter, with the
    vocabulary taken as GPT-2's. Memory: /dev/shm, 1 GiB for the launcher, for each process its
    libraries (1 GiB, 6 GiB where CUDA is loaded) and the training state, and the copy of that which
    is being saved. What a folder of `init_from` holds is not known here: the least of GPT-2, unless
    a preset says.
    """
    train = spec.train
    if train.init_from and train.preset is None:
        train = dataclasses.replace(train, preset="gpt2")
    c = config.with_preset(train, accelerator=spec.gpus > 0)
    training_bytes = 12 * shape.n_params(c, 50_257)
    process_bytes = (6 if spec.gpus > 0 else 1) * 2**30 + training_bytes
    rest_bytes = 2**30 + training_bytes + quantity.number(shm)
    return quantity.gibibytes(rest_bytes + nproc * process_bytes)


def _train(file: Path | None, args: Sequence[str]) -> Config:
    """The trainer's configuration: the `[train]` table, then the arguments after `--`."""
    if file and any(a == "--config" or a.startswith("--config=") for a in args):
        raise ConfigError(
            f"--config and -f {file} both bring trainer settings: put them into [train] of {file}"
        )
    first = ["--config", str(file)] if file else []
    return flags.from_args([*first, *args], prog="gptddp-k8s submit ... --")


def _job_table(file: Path) -> dict[str, Any]:
    """The `[job]` table with its values' types checked; tables are dicts."""
    if file.suffix in (".yaml", ".yml", ".json"):
        raise ConfigError(
            f"-f {file}: job.toml is read here, and no manifest: `kubectl create -f` submits one"
        )
    tables, where = read_toml(file, "job file"), name_of(file)
    for name, table in tables.items():
        if name not in ("job", "train"):
            raise ConfigError(f"{where}: {name!r} is not one of the tables [job] and [train]")
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {name} must be one table: write [{name}] above its keys")
    table = tables.get("job", {})
    for key in table:
        if gone := pod.gone(key):
            raise ConfigError(f"{where}: job.{key} {gone}")
        if key not in FIELDS:
            raise ConfigError(f"{where}: unknown key job.{key}{did_you_mean(key, FIELDS)}")
    return {
        key: from_toml(f"{where}: job.{key}", kind(key), value, file.parent)
        for key, value in table.items()
    }
