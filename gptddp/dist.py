"""From the environment of torchrun, Slurm or nothing at all to a process group, and back."""

import contextlib
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as td

from gptddp import errors
from gptddp.files import write_json_atomic

# The first step connects the peers and, on an accelerator, compiles kernels.
FIRST_TIMEOUT_S = 300.0
TIMEOUT_S = 60.0
PART_S = 10.0  # for all ranks to come out of the last collective
_SMALL_BYTES = 1 << 20

_left: list[Any] = []  # the group that this process has left: it goes with the process


@dataclass(frozen=True)
class Dist:
    """This process's place in the world. The group is up for as long as `connect` lasts."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    nodes: int  # pods in the present world
    restarts: int  # of this pod's workers by its agent
    address: str  # the pod's own address when it has one to itself, else ""
    memory: Path | None  # a folder in memory that outlives this process, of the pod's ranks alone
    job: str | None  # the job by a name of its own, the same in all its lives; None: this process
    pods: tuple[str, ...]  # the name of each rank's pod, "" where it is in none

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """All ranks: the sum of a small tensor over the ranks, on the CPU."""
        on_device = values.to(self.device)
        td.all_reduce(on_device)
        return on_device.cpu()

    @torch.no_grad()
    def broadcast(self, tensors: Collection[torch.Tensor], source: int) -> None:
        """All ranks: the values of the rank `source`, in place.

        Small tensors travel as one: each broadcast costs a round trip (208 tensors of 16 MB, four
        ranks on one machine: 0.2 s one by one, 0.03 s so). A copy of large ones costs more.
        """
        # by item size, so that each begins where a view of its dtype may
        small = sorted((t for t in tensors if t.nbytes < _SMALL_BYTES), key=lambda t: -t.itemsize)
        flat = torch.cat([t.reshape(-1).view(torch.uint8) for t in small])
        td.broadcast(flat, src=source)
        for tensor, part in zip(small, torch.split(flat, [t.nbytes for t in small]), strict=True):
            tensor.copy_(part.view(tensor.dtype).view(tensor.shape))
        for tensor in tensors:
            if tensor.nbytes >= _SMALL_BYTES:
                td.broadcast(tensor, src=source)

    def gather(self, value: Any) -> list[Any]:
        """All ranks: every rank's small value, by rank."""
        values = [None] * self.world_size
        td.all_gather_object(values, value)
        return values

    def share(self, value: Any, source: int) -> Any:
        """All ranks: the small value that the rank `source` has."""
        box = [value]
        td.broadcast_object_list(box, src=source, device=self.device)
        return box[0]

    def part(self) -> None:
        """All ranks: nobody leaves before everybody is here, and has left its last collective.

        gloo may never wake a rank whose peer closes its connections while it still sends. So the
        last word goes through the store, which rank 0 has: it is the last to go.
        """
        self.all_reduce(torch.zeros(1))
        store = td.distributed_c10d._get_default_store()
        end = time.monotonic() + PART_S
        # at its end rank 0 has seen all, and has left
        with limit(2 * PART_S), contextlib.suppress(td.DistError):
            store.add("parted", 1)
            while store.add("parted", 0) < self.world_size and time.monotonic() < end:
                time.sleep(0.005)
        if self.rank == 0 and self.world_size > 1:
            time.sleep(0.05)

    def from_rank_0(self, work: Callable[[], Any]) -> Any:
        """All ranks: the result of `work`, done on rank 0 only; its user error is everybody's.

        Storage is read by one process, and all ranks take the same decision or none.
        """
        box: list[Any] = [None]
        if self.rank == 0:
            try:
                box = [("ok", work())]
            except errors.GptddpError as error:
                box = [(type(error).__name__, str(error))]
        td.broadcast_object_list(box, src=0, device=self.device)
        kind, value = box[0]
        if kind != "ok":
            shared = getattr(errors, kind)(value)
            shared.shared = True
            raise shared
        return value

    def set_timeout(self, seconds: float) -> None:
        """How long a collective waits for a silent peer before it fails: a minute at least."""
        timeout = timedelta(seconds=max(TIMEOUT_S, seconds))
        td.distributed_c10d._set_pg_timeout(timeout, td.group.WORLD)

    def name(self, rank: int) -> str:
        """A rank as a message says it."""
        return f"rank {rank} ({self.pods[rank]})" if self.pods[rank] else f"rank {rank}"


def is_launched() -> bool:
    """Did torchrun or Slurm start this process, beside others?"""
    return "RANK" in os.environ or "SLURM_PROCID" in os.environ


def place() -> tuple[int, int, int, int]:
    """Rank, local rank, world size and local world size: torchrun's, Slurm's, or one process.

    `srun` sets no RANK, so its own variables are mapped; MASTER_ADDR and MASTER_PORT must then be
    exported by the job script.
    """
    env = os.environ
    if "RANK" in env:
        keys = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    elif "SLURM_PROCID" in env and "MASTER_ADDR" in env:
        keys = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NTASKS_PER_NODE")
    else:
        return 0, 0, 1, 1
    try:
        rank, local_rank, world_size = (int(env[key]) for key in keys[:3])
        return rank, local_rank, world_size, int(env.get(keys[3], "1"))
    except (KeyError, ValueError) as error:
        raise errors.ConfigError(
            f"the environment has {keys[0]} but no usable {error}: start through torchrun or srun"
        ) from None


@contextlib.contextmanager
def connect(device: str | None) -> Iterator[Dist]:
    """Join the process group, in torch's order: device, then group; leave it on every path."""
    rank, local_rank, world_size, local_world_size = place()
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and local_rank >= torch.cuda.device_count():
        raise errors.ConfigError(
            f"device is cuda, but local rank {local_rank} finds {torch.cuda.device_count()} GPUs: "
            "start fewer processes a node, or use --device cpu"
        )
    where = torch.device(kind, local_rank) if kind == "cuda" else torch.device("cpu")
    torch.set_num_threads(max(1, cpu_quota() // local_world_size))
    if kind == "cuda":
        torch.cuda.set_device(where)
    alone = world_size == 1 and "MASTER_ADDR" not in os.environ
    pods = [""] * world_size
    with limit(FIRST_TIMEOUT_S + 10):
        td.init_process_group(
            backend="nccl" if kind == "cuda" else "gloo",
            rank=rank,
            world_size=world_size,
            store=td.HashStore() if alone else None,  # type: ignore[attr-defined]
            device_id=where if kind == "cuda" else None,
            timeout=timedelta(seconds=FIRST_TIMEOUT_S),
        )
        td.all_gather_object(pods, os.environ.get("POD_NAME", ""))  # all ranks
    try:
        yield Dist(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            local_world_size=local_world_size,
            device=where,
            nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
            restarts=restarts(),
            address=os.environ.get("POD_ADDRESS", ""),
            memory=shared_memory(),
            job=job(),
            pods=tuple(pods),
        )
    finally:
        # Its destructor joins gloo's threads without letting go of the GIL (torch 2.13). One that
        # still needs it, to drop the tensor of the last collective, would never end, nor would we.
        _left[:] = [td.group.WORLD]
        td.destroy_process_group()


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """End the process if this takes longer: torch waits for a stopped rank 0's store for ever."""

    def give_up() -> None:
        print(f"[rank {place()[0]}] a peer has not answered for {seconds:g} s", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def shared_memory() -> Path | None:
    """GPTDDP_MEMORY, which the manifest sets to the pod's /dev/shm: there, what is left has an end.

    On a machine of its own a run that is never taken up again would hold its state for ever.
    """
    return Path(os.environ["GPTDDP_MEMORY"]) if os.environ.get("GPTDDP_MEMORY") else None


def job() -> str | None:
    """The name of the job that all its pods and lives share, and no other job has.

    A rendezvous id alone is none: people copy it, and one manifest may run in two places, but not
    at one rendezvous. Nor is a Slurm step unless its tasks are the ranks: it may be a shell.
    """
    env = os.environ
    if "SLURM_PROCID" in env and "MASTER_ADDR" in env and "RANK" not in env:
        return f"slurm-{env.get('SLURM_JOB_ID')}.{env.get('SLURM_STEP_ID')}"
    run_id, endpoint = env.get("TORCHELASTIC_RUN_ID"), env.get("PET_RDZV_ENDPOINT")
    return f"{run_id} at {endpoint}" if run_id and endpoint else None


def grace_s() -> float | None:
    """GPTDDP_GRACE_S: seconds from SIGTERM to SIGKILL; None where nobody has told."""
    text = os.environ.get("GPTDDP_GRACE_S", "")
    return float(text) if text.isdigit() else None


def restarts() -> int:
    """How often this pod's agent has started its workers again."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def verdict() -> Path | None:
    """Where our launcher looks for a final error of its workers; the folder is the pod's own."""
    return Path(os.environ["GPTDDP_VERDICT"]) if os.environ.get("GPTDDP_VERDICT") else None


def pod() -> str:
    """The name of the pod or machine, for messages."""
    return os.environ.get("POD_NAME") or socket.gethostname()


def is_lost_peer(error: BaseException) -> bool:
    """Did a collective fail because another rank is gone or silent? Not this rank's own fault."""
    if isinstance(error, td.DistError):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    return "gloo" in text or "Connection closed by peer" in text


def report(error: errors.GptddpError) -> None:
    """Say a final error once: on rank 0, or on the rank that met it alone.

    Our launcher gives its workers a file for the verdict, because torchrun would hide the exit code
    and the reason. It says what it finds there, as the last line of the pod's log.
    """
    rank = place()[0]
    if path := verdict():
        final = {"code": error.exit_code, "rank": rank, "message": str(error)}
        with contextlib.suppress(OSError):  # a full disk: then it has to be said here
            write_json_atomic(path, final)
            return
    if rank == 0 or not error.shared:
        where = f"[rank {rank}] " if rank else ""
        print(f"{where}gptddp train: {error}", file=sys.stderr, flush=True)


# -- what this machine can do --------------------------------------------------------------------


def cpu_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs that this process may use: its affinity, cut to the cgroup's quota (v2 or v1).

    torch counts the host's cores, which throttles a pod that is given two of sixty-four.
    """
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        if (cgroup / "cpu.max").exists():
            quota, period = (cgroup / "cpu.max").read_text().split()
        else:
            quota = (cgroup / "cpu/cpu.cfs_quota_us").read_text()
            period = (cgroup / "cpu/cpu.cfs_period_us").read_text()
        if float(quota) > 0:  # "max" raises ValueError, v1 says -1 for no limit
            cpus = min(cpus, math.ceil(float(quota) / float(period)))
    return max(1, cpus)


def has_fast_bf16(device: torch.device) -> bool:
    """Does bf16 run at full speed here: Ampere or newer, or a CPU with AMX or AVX512-BF16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def use_fast_fp32(device: torch.device) -> None:
    """Let oneDNN multiply fp32 matrices, twice as fast as MKL here, if it keeps them fp32.

    "medium" selects oneDNN on CPUs. With AMX it may round to bf16, which is not what `fp32` says:
    one product tells (relative error 4e-7 in true fp32, 4e-3 in bf16).
    """
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        return
    torch.set_float32_matmul_precision("medium")
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    if ((a @ b).double() - exact).norm() / exact.norm() > 1e-5:
        torch.set_float32_matmul_precision("highest")
