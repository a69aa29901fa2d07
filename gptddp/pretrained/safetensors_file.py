"""Reading safetensors files.

With plain reads: a map of a file that a volume takes away, or that another process cuts off, would
end the process by a signal.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from gptddp.errors import ConfigError

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_CHUNK = 64 << 20  # bytes read at once


class Stored(NamedTuple):
    """A tensor as its file has it, on the CPU."""

    path: Path
    tensor: Tensor


def tensors_in(path: Path, tell: Callable[[str], None] = lambda _: None) -> dict[str, Stored]:
    """The tensors of a file by name. Raises ConfigError where it is torn or none, OSError."""
    chunks = []
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            chunks.append(chunk)
            tell(f"reading {path}: {len(chunks) * _CHUNK >> 20} MiB")
    try:
        found = load(b"".join(chunks))
    except (SafetensorError, KeyError) as error:  # KeyError: of a dtype that torch has not
        raise ConfigError(
            f"{path} is torn, or no safetensors file ({error}): copy the file anew from where it "
            "came from"
        ) from None
    return {name: Stored(path, tensor) for name, tensor in found.items()}


def in_fp32(name: str, stored: Stored) -> Tensor:
    """Its values. Raises ConfigError where they cannot be used."""
    path, tensor = stored
    if tensor.dtype not in _FLOATS:
        raise ConfigError(
            f"{path}: {name} is of {tensor.dtype}: use float32, float16 or bfloat16; others, as of "
            "quantized weights, have to be converted first"
        )
    tensor = tensor.float()
    if not bool(torch.isfinite(tensor).all()):
        raise ConfigError(
            f"{path}: {name} has values that are not finite (NaN or infinite): a run that begins "
            "with them has no finite step; use weights from before that"
        )
    return tensor
