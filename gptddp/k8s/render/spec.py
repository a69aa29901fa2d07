"""The job as its user states it: one frozen dataclass, from `job.toml` and flags.

Precedence: defaults < the `[job]` table < flags. `None` means "computed from the rest": see
`resolve`, which explains each such default. The trainer's part is a `gptddp.config.Config`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptddp import __version__, config, flags, grid, shape
from gptddp.config import Config
from gptddp.errors import ConfigError
from gptddp.flags import did_you_mean, name_of, read_toml
from gptddp.k8s.render import fields, forms, pod, problem, quantity
from gptddp.k8s.render.fields import FROM_DISK, TABLES, Kind, from_toml
from gptddp.k8s.render.fields import flag as flag  # exported with the spec
from gptddp.k8s.render.fields import option as _f
from gptddp.k8s.render.pod import PodOptions

if TYPE_CHECKING:
    from gptddp.k8s.render.code import Code

RENDEZVOUS_PORT = 23456  # the operator's
_PARTS = ("pod", "train")  # fields that are dataclasses themselves


@dataclass(frozen=True)
class JobSpec:
    """Everything that determines a job's manifest. Every field is a flag and a key of [job]; the
    last two are dataclasses of options."""

    name: str = _f("gptddp", "name of the job, of its pods <name>-worker-<i>, and of the run")
    namespace: str | None = _f(None, "namespace; by default the one of kubectl's context")
    image: str = _f(f"gptddp:{__version__}", "image whose entrypoint is `python -m gptddp.launch`")
    code: "Code | None" = _f(
        None, "folder with Python files that replace the image's", Kind.CODE, "DIR"
    )
    replicas: int = _f(1, "number of pods; also the maximum, without --max", Kind.NUMBER)
    min: int | None = _f(
        None, "minimum pods to train with [default: half of replicas, rounded up]", Kind.NUMBER
    )
    max: int | None = _f(
        None, "maximum pods, for scaling up later [default: replicas]", Kind.NUMBER
    )
    nproc_per_node: int | None = _f(
        None, "worker processes per pod [default: its GPUs, or 1]", Kind.NUMBER
    )
    cpu: str | None = _f(
        None,
        "CPUs per pod, request and limit [default: 1 per worker process, 3 with a GPU]",
        Kind.QUANTITY,
    )
    memory: str | None = _f(
        None,
        "memory per pod, request and limit, shm included [default: from the model's size]",
        Kind.QUANTITY,
    )
    gpus: int = _f(0, "GPUs per pod", Kind.NUMBER)
    gpu_resource: str = _f("nvidia.com/gpu", "resource name of a GPU, for other vendors or slices")
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
        None, "WorkloadPriorityClass: the job's priority in its queue", metavar="NAME"
    )
    topology: str | None = _f(
        None,
        "nodes that Kueue chooses: required=LABEL (all with the same value of this label), "
        "preferred=LABEL or unconstrained",
        metavar="WISH",
    )
    pod: PodOptions = PodOptions()
    train: Config = Config()

    @property
    def claim(self) -> str:
        return self.data.partition("/")[0]

    @property
    def data_path(self) -> str:
        """The dataset's path inside its claim; "": the claim's root."""
        return self.data.partition("/")[2].strip("/")

    @property
    def runs_claim(self) -> str:
        return self.runs.partition("/")[0]

    @property
    def run_path(self) -> str:
        """The run's path inside its claim."""
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

    Like `given`, with all open fields filled.
    """
    return load_all(file, flags, train_args, {})[0]


def load_all(
    file: Path | None, flags: Mapping[str, Any], train_args: Sequence[str], swept: Mapping[str, str]
) -> list[JobSpec]:
    """One job as of `load` per run of a sweep; the run's name is appended. Raises ConfigError."""
    spec = given(file, flags, train_args)
    if spec.code is not None:
        _ = spec.code.archive  # raises its errors now
    runs = grid.configurations(swept, spec.train, train_args)
    named = {"-".join(filter(None, [spec.name, name])): train for name, train in runs.items()}
    return [resolve(dataclasses.replace(spec, name=it, train=c)) for it, c in named.items()]


def given(file: Path | None, flags: Mapping[str, Any], train_args: Sequence[str]) -> JobSpec:
    """The job with only the fields that its user has stated.

    Raises ConfigError for values that cannot be read; `rules.check` checks their meaning.
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
    """Fill every open field.

    - min: ceil(N/2): half of the pods continue while the others are replaced. The two halves of a
      split network cannot both continue, as only one gets the run's lease.
    - nproc_per_node: one process per GPU; "auto" would count the node's cores, not the pod's.
    - cpu: one per process, as a small model can use one thread per rank; 3 with a GPU, for its
      data threads, which still fits a node of four cores.
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

    The training state is weights and two Adam moments in fp32, 12 bytes per parameter, assuming
    GPT-2's vocabulary. Memory: /dev/shm, 1 GiB for the launcher, for each process its libraries
    (1 GiB, 6 GiB with CUDA) and the training state, and a copy of that state for saving. The model
    in a folder of `init_from` is not known here: assumes the smallest GPT-2, unless a preset is
    given.
    """
    train = spec.train
    if train.init_from and train.preset is None:
        train = dataclasses.replace(train, preset="gpt2")
    c = config.with_preset(train, accelerator=spec.gpus > 0)
    training_bytes = 12 * shape.n_params(c, 50_257)
    process_bytes = (6 if spec.gpus > 0 else 1) * 2**30 + training_bytes
    rest_bytes = 2**30 + training_bytes + quantity.number(shm)
    return f"{math.ceil((rest_bytes + nproc * process_bytes) / 2**30)}Gi"


def _train(file: Path | None, args: Sequence[str]) -> Config:
    """The trainer's configuration: the `[train]` table, then the arguments after `--`."""
    if file and any(a == "--config" or a.startswith("--config=") for a in args):
        raise ConfigError(
            f"--config and -f {file} both bring trainer settings: put them into [train] of {file}"
        )
    first = ["--config", str(file)] if file else []
    return flags.from_args([*first, *args], prog="gptddp-k8s submit ... --")


def _job_table(file: Path) -> dict[str, Any]:
    """The `[job]` table with the types of its values checked; tables are dicts."""
    if file.suffix in (".yaml", ".yml", ".json"):
        raise ConfigError(
            f"-f {file}: give a job.toml, not a manifest: `kubectl create -f` submits a manifest"
        )
    tables, where = read_toml(file, "job file"), name_of(file)
    for name, table in tables.items():
        if name not in ("job", "train"):
            raise ConfigError(f"{where}: {name!r} is not one of the tables [job] and [train]")
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {name} must be one table: write [{name}] above its keys")
    table = tables.get("job", {})
    for key in table:
        if key not in FIELDS:
            raise ConfigError(f"{where}: unknown key job.{key}{did_you_mean(key, FIELDS)}")
    return {
        key: from_toml(f"{where}: job.{key}", kind(key), value, file.parent)
        for key, value in table.items()
    }
