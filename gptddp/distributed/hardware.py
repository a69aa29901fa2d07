"""The abilities of this machine: CPUs, GPUs, numerics, memory."""

import contextlib
import math
import os
import platform
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gptddp.config import Config
from gptddp.distributed.environment import has_own_gpus
from gptddp.distributed.torch_private import cpu_has_amx
from gptddp.errors import ConfigError


def cpu_quota(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """CPUs that this process may use: its affinity, cut to the cgroup's quota (v2 or v1).

    torch counts the host's cores, which throttles a pod with two cores of sixty-four.
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


def gpu_of(local_rank: int) -> int:
    """The number of this rank's GPU among those that it sees; ConfigError if it has no GPU."""
    count = torch.cuda.device_count()
    if local_rank < count:
        return local_rank
    if count and has_own_gpus():
        return 0
    raise ConfigError(
        f"device is cuda, but local rank {local_rank} finds {count} GPUs: start fewer processes a "
        "node, give each a GPU (`srun --gpus-per-task=1`), or use --device cpu"
    )


def device_of(wanted: str | None, local_rank: int) -> torch.device:
    """This rank's device, made the current one."""
    if (wanted or ("cuda" if torch.cuda.is_available() else "cpu")) != "cuda":
        return torch.device("cpu")
    device = torch.device("cuda", gpu_of(local_rank))
    torch.cuda.set_device(device)
    return device


# Default numerics by the features of the processor: the fastest of the measured ones, for `tiny`,
# in tokens a second (torch 2.13), on two cores, and on one core of AMD's.
#                                  bf16 onednn   bf16 mkl   fp32 onednn   fp32 mkl
#   AMX                            42.2 k                   31.0 k        24.2 k
#   AVX512-BF16, no AMX            10.3 k                    9.6 k        15.7 k
#   AVX512-BF16 of AMD (Zen 5)     13.5 k        15.5 k     11.3 k         8.4 k
#   AVX512-BF16 of AMD (Zen 4)      7.4 k         8.5 k      6.0 k         6.3 k
# These are with torch's attention kernel. Blocks are used where they were measured to be faster: a
# step 1.22 times with MKL on Zen 5, and 1.05 to 2.0 times, 1.2 in the median of five turns, with
# oneDNN on a Xeon with AMX (torch 2.15).
_WITH_AMX = {"precision": "bf16", "matmul": "onednn", "attention": "blocks"}
_AMD = {"precision": "bf16", "matmul": "mkl", "attention": "blocks"}
_WITHOUT = {"precision": "fp32", "matmul": "mkl", "attention": "fused"}

# Variables that make these libraries compute in another way.
_SWITCHES = (
    *("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    *("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"),
)

_OPENMP = ("OMP_DYNAMIC", "OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS")

# torch's names for the libraries that multiply fp32 matrices. On a GPU only tf32 differs.
_MATMUL = {"mkl": "highest", "onednn": "medium", "tf32": "high"}


def cpu_info() -> dict[str, str]:
    """Linux's facts of the first processor: "vendor_id", "model name", "flags" and more."""
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        fields = (line.partition(":") for line in first.splitlines())
        return {name.strip(): value.strip() for name, _, value in fields}
    return {}


def machine(device: torch.device | None) -> str:
    """The facts that decide the bits beside the run's fields: this processor, and the libraries.

    Also the variables that make those compute in another way, if set.
    """
    kind = cpu_info().get("model name", platform.machine())
    if device is not None and device.type == "cuda":
        kind = f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}"
    capability = torch.backends.cpu.get_cpu_capability()
    switches = [f", {it}={os.environ[it]}" for it in _SWITCHES if os.environ.get(it)]
    return f"{kind} ({capability}), torch {torch.__version__}{''.join(switches)}"


def numerics(device: torch.device, precision: str | None = None) -> dict[str, Any]:
    """`precision`, `matmul`, `attention` and `threads` for a new run on this machine.

    `precision`: as given by the user. With AMX, oneDNN is for bf16 only: see `use`.
    """
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)  # Ampere or newer
        found = {"precision": "bf16" if fast else "fp32", "matmul": "tf32", "attention": "fused"}
    else:
        cpu = cpu_info()
        amd = cpu.get("vendor_id") == "AuthenticAMD"
        amd_bf16 = amd and "avx512_bf16" in cpu.get("flags", "").split()
        amx = cpu_has_amx() and precision != "fp32"
        found = _WITH_AMX if amx else _AMD if amd_bf16 else _WITHOUT
    return {**found, "threads": torch.get_num_threads()}


# FLOP/s of products in bf16 with sums in fp32, without sparsity, by a part of torch's name for a
# GPU, from NVIDIA's data sheets.
_PEAKS = {
    "A100": 312e12,
    "H100 80GB HBM3": 989.5e12,
    "H100 PCIe": 756e12,
    "H200": 989.5e12,
}


def peak_flops(gpu: str, c: Config) -> float | None:
    """The peak FLOP/s of a GPU of this name in the run's precision; None: unknown."""
    found = [peak for name, peak in _PEAKS.items() if name in gpu and c.precision == "bf16"]
    return found[0] if found else None


class PeakMemory:
    """The peak memory of this process since `reset`, by kind."""

    def __init__(self, device: torch.device | None) -> None:
        self._cuda = device if device and device.type == "cuda" else None
        self.kinds = ("allocated", "reserved") if self._cuda else ("resident",)
        self.most = 0  # bytes of the first kind; `reset` does not lower it

    def read(self) -> tuple[int, ...]:
        """Bytes of each of the `kinds`."""
        if self._cuda is None:  # KiB; it cannot be reset
            found: tuple[int, ...] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,)
        else:
            allocated = torch.cuda.max_memory_allocated(self._cuda)
            found = (allocated, torch.cuda.max_memory_reserved(self._cuda))
        self.most = max(self.most, found[0])
        return found

    def reset(self) -> None:
        """On a GPU: measure from now on."""
        if self._cuda is not None:
            self.read()
            torch.cuda.reset_peak_memory_stats(self._cuda)


def use(c: Config, device: torch.device) -> None:
    """Set the run's threads and its library for products of matrices, which decide the bits.

    Raises ConfigError if fp32 would not stay fp32: oneDNN may round to bf16 with AMX. In a run
    of bf16 it may: little is in fp32 there, and only one kind of processor must give the same bits.
    Raises it also if the environment has fewer threads than the run.
    """
    torch.set_num_threads(c.threads)
    if c.reduce == "exact" and (variable := _takes_threads(c.threads, os.environ)):
        raise ConfigError(
            f"{variable} is set: a rank may get fewer threads than the {c.threads} of the run, "
            "and their number decides its bits: unset it, or begin a run with --threads 1"
        )
    torch.set_float32_matmul_precision(_MATMUL[c.matmul])
    on_cpu, mixed = device.type == "cpu", c.precision == "bf16"
    if on_cpu and c.matmul == "onednn" and not mixed and not _keeps_fp32():
        raise ConfigError(
            "matmul is onednn, which multiplies fp32 matrices in bf16 on this processor: begin a "
            "run with --matmul mkl, or continue this one on the kind of processor it began on"
        )


def _takes_threads(threads: int, environment: Mapping[str, str]) -> str | None:
    """The variable, with its value, that lets OpenMP give fewer threads than requested.

    OpenMP reads them at the start of a process: set_num_threads does not override them.
    """
    values = {name: environment.get(name, "").strip().lower() for name in _OPENMP}
    limit = values["OMP_THREAD_LIMIT"]
    few = {
        "OMP_DYNAMIC": values["OMP_DYNAMIC"] == "true",
        "OMP_THREAD_LIMIT": limit.isdecimal() and 0 < int(limit) < threads,
        "OMP_MAX_ACTIVE_LEVELS": values["OMP_MAX_ACTIVE_LEVELS"] == "0",
    }
    return next((f"{it}={values[it]}" for it in _OPENMP if threads > 1 and few[it]), None)


def _keeps_fp32() -> bool:
    """Has a product of fp32 matrices fp32 accuracy? Its error is then 4e-7, in bf16 4e-3."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(256, 256, generator=generator) for _ in range(2))
    exact = a.double() @ b.double()
    return bool(((a @ b).double() - exact).norm() / exact.norm() < 1e-5)
