"""What this package uses of torch beyond its API, read in torch 2.13, and a check that it is there.

No other module touches a private name of torch or of multiprocessing, but for the second half of
this one: `torch_private_elastic.py` has the parts of torchrun, for the launcher alone. torch is
imported inside the functions, because the launcher imports this module before it needs torch.
"""

from datetime import timedelta
from typing import Any


def default_store() -> Any:
    """The key-value store of the process group, which rank 0 hosts: torch hands out no other."""
    import torch.distributed as td

    return td.distributed_c10d._get_default_store()


def set_collective_timeout(timeout: timedelta) -> None:
    """How long a collective waits from now on: the API takes it only when the group is made."""
    import torch.distributed as td

    td.distributed_c10d._set_pg_timeout(timeout, td.group.WORLD)


def cpu_has_fast_bf16() -> bool:
    """Does this CPU multiply bf16 matrices in hardware (AMX or AVX512-BF16)? No API tells."""
    import torch

    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())
