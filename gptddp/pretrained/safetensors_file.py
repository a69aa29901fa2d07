"""Reading safetensors files: a header in JSON, then raw tensors.

With plain reads: a map of a file that a volume takes away, or that another process cuts off, would
end the process by a signal. The format: https://huggingface.co/docs/safetensors
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptddp.errors import ConfigError
from gptddp.files import parse_json

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MOST_HEADER_BYTES = 100_000_000  # as the format says
_FIX = "copy the file anew from where it came from"


@dataclass(frozen=True)
class Stored:
    """A tensor of a file: where its bytes are, from the beginning of the file."""

    path: Path
    dtype: str  # as the format names it
    shape: tuple[int, ...]
    begin: int
    end: int


def tensors_in(path: Path) -> dict[str, Stored]:
    """The tensors of a file by name. Raises ConfigError where it is torn or none, OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(_MOST_HEADER_BYTES, size - 8):
            raise ConfigError(f"{path} is no safetensors file, or is cut off in its header: {_FIX}")
        text = file.read(length)
    try:
        header = parse_json(text)
        assert isinstance(header, dict)
    except (ValueError, AssertionError) as error:
        raise ConfigError(f"{path} has a header that is not JSON ({error}): {_FIX}") from None
    header.pop("__metadata__", None)
    found = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
    end = 8 + length
    for name, it in sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)):
        if it.begin != end:  # the format has tensor behind tensor, up to the end
            raise ConfigError(
                f"{path}: {name} begins at byte {it.begin}, and what is before it ends at {end}, "
                f"which is none of the format: {_FIX}"
            )
        end = it.end
    if end != size:
        what = "is cut off" if size < end else "has bytes that belong to no tensor"
        raise ConfigError(f"{path} {what}: it has {size} bytes in place of {end}; {_FIX}")
    return found


def _stored(path: Path, name: str, entry: Any, base: int) -> Stored:
    """One entry of the header, which may have any content."""
    entry = entry if isinstance(entry, Mapping) else {}
    dtype, shape, where = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    lists = isinstance(shape, list) and isinstance(where, list) and len(where) == 2
    if not lists or any(type(n) is not int or n < 0 for n in [*shape, *where]):
        raise ConfigError(f"{path}: the header's entry of {name} is none of the format: {_FIX}")
    dtype, n_bytes = str(dtype), where[1] - where[0]
    if n_bytes < 0 or (dtype in _FLOATS and n_bytes != math.prod(shape) * _FLOATS[dtype].itemsize):
        raise ConfigError(f"{path}: {name} has {n_bytes} bytes for {dtype} {shape}: {_FIX}")
    return Stored(path, dtype, tuple(shape), base + where[0], base + where[1])


def read_tensor(name: str, stored: Stored) -> Tensor:
    """The tensor in fp32, on the CPU. Raises ConfigError where it cannot be used, OSError."""
    path = stored.path
    if stored.dtype not in _FLOATS:
        raise ConfigError(
            f"{path}: {name} is of dtype {stored.dtype}: use one of {', '.join(_FLOATS)}; others, "
            "as of quantized weights, have to be converted first"
        )
    raw = torch.empty(stored.end - stored.begin, dtype=torch.uint8)
    with path.open("rb") as file:
        file.seek(stored.begin)
        if file.readinto(raw.numpy().data) != len(raw):
            raise ConfigError(f"{path} is cut off in {name}: {_FIX}")
    tensor = raw.view(_FLOATS[stored.dtype]).view(stored.shape).float()
    if not bool(torch.isfinite(tensor).all()):
        raise ConfigError(
            f"{path}: {name} has values that are not finite (NaN or infinite): a run that begins "
            "with them has no finite step; use weights from before that"
        )
    return tensor
