"""What this machine can do."""

import contextlib
import math
import os
from pathlib import Path

import torch

from gptddp.distributed.torch_private import cpu_has_fast_bf16


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
    return cpu_has_fast_bf16()


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
