"""Lay out tensors in one flat buffer, and stage them in shared memory."""

import contextlib
import mmap
import os
from collections.abc import Mapping
from typing import Any

import torch

_ALIGN = 64  # bytes; a multiple of every item size, so that a view of any dtype can begin there


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, dict[str, Any]], int]:
    """The place of each tensor in the one shard, as in the manifest; the shard's size in bytes."""
    entries, end = {}, 0
    for name, tensor in tensors.items():
        offset, nbytes = -(-end // _ALIGN) * _ALIGN, tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "shard": 0,
            "offset": offset,
            "nbytes": nbytes,
        }
        end = offset + nbytes
    return entries, end


def tensor_at(buffer: torch.Tensor, entry: Mapping[str, Any]) -> torch.Tensor:
    """The tensor of an entry of a layout: a view of the buffer (uint8), not a copy."""
    flat = buffer[entry["offset"] : entry["offset"] + entry["nbytes"]]
    tensor: torch.Tensor = flat.view(getattr(torch, entry["dtype"])).view(entry["shape"])
    return tensor


def tensors_at(
    buffer: torch.Tensor, entries: Mapping[str, Mapping[str, Any]]
) -> dict[str, torch.Tensor]:
    """The tensors of all entries of a layout, by name. Raises ValueError for an invalid entry."""
    found = {}
    for name, entry in entries.items():
        try:
            found[name] = tensor_at(buffer, entry)
        except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"tensors[{name!r:.80}] is not a valid tensor ({reason})") from None
    return found


class Staging:
    """Memory that other processes can share, with room for the tensors of one layout.

    It has no name (memfd): it vanishes with the last process that uses it, and the size of /dev/shm
    does not limit it. Pinned for CUDA. Raises OSError if there is not enough memory.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.layout, self.nbytes = layout(tensors)
        self.cuda = any(tensor.is_cuda for tensor in tensors.values())
        self.size = max(self.nbytes, mmap.PAGESIZE)  # mmap refuses zero bytes
        self.fd = os.memfd_create("gptddp-state")
        os.posix_fallocate(self.fd, 0, self.size)
        self.buffer = torch.frombuffer(mmap.mmap(self.fd, self.size), dtype=torch.uint8)
        self.buffer.zero_()  # touches every page now, not during the first copy
        if self.cuda:
            runtime: Any = torch.cuda.cudart  # untyped
            with contextlib.suppress(RuntimeError):  # not pinned: the copy is slower
                where = self.buffer.data_ptr(), self.size
                torch.cuda.check_error(runtime().cudaHostRegister(*where, 0))
        self.views = {name: tensor_at(self.buffer, entry) for name, entry in self.layout.items()}

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.fd)

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors in."""
        for name, tensor in tensors.items():
            self.views[name].copy_(tensor, non_blocking=True)
        if self.cuda:
            torch.cuda.synchronize()
