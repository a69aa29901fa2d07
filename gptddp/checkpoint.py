"""Tensors and a checkpoint's bytes: one flat layout to stage them in, and the verified load.

`writer.py` saves what is staged here; both are for rank 0 only.
"""

import errno
import logging
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gptddp import retention, store
from gptddp.errors import CheckpointError

log = logging.getLogger(__name__)

_ALIGN = 64  # bytes; a multiple of every item size, so that a view of any dtype can begin there


# -- one flat layout ---------------------------------------------------------------------------


def layout(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, dict[str, Any]], int]:
    """Where each tensor lies in the one shard, as in the manifest, and the shard's bytes."""
    entries, end = {}, 0
    for name, tensor in tensors.items():
        offset, nbytes = -(-end // _ALIGN) * _ALIGN, tensor.numel() * tensor.element_size()
        entries[name] = {
            "dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape),
            "shard": 0, "offset": offset, "nbytes": nbytes,
        }  # fmt: skip
        end = offset + nbytes
    return entries, end


def view(buffers: list[torch.Tensor], entry: dict[str, Any]) -> torch.Tensor:
    """A tensor of the layout, without a copy."""
    flat = buffers[entry["shard"]][entry["offset"] : entry["offset"] + entry["nbytes"]]
    tensor: torch.Tensor = flat.view(getattr(torch, entry["dtype"])).view(entry["shape"])
    return tensor


class Staging:
    """A buffer in CPU memory, pinned for CUDA, with a view for each tensor of one layout."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.layout, nbytes = layout(tensors)
        self.cuda = any(tensor.is_cuda for tensor in tensors.values())
        room = torch.empty(nbytes + mmap.PAGESIZE, dtype=torch.uint8, pin_memory=self.cuda)
        self.buffer = room[-room.data_ptr() % mmap.PAGESIZE :][:nbytes]  # for `bypass_cache`
        self.buffer.zero_()  # touches every page now, not in the first copy
        self.views = {name: view([self.buffer], entry) for name, entry in self.layout.items()}

    def fits(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Are these the names, shapes and dtypes that the buffer was made for."""
        return layout(tensors)[0] == self.layout

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, torch.Tensor]) -> memoryview:
        """Copy the tensors in, and return the buffer's bytes."""
        for name, tensor in tensors.items():
            self.views[name].copy_(tensor, non_blocking=True)
        if self.cuda:
            torch.cuda.synchronize()
        return self.buffer.numpy().data


# -- load --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint: tensors in CPU memory, views of one buffer a shard."""

    path: Path
    step: int
    generation: int
    tensors: dict[str, torch.Tensor]
    meta: dict[str, Any]
    nbytes: int
    skipped: tuple[str, ...]  # why each newer one was not taken

    @property
    def name(self) -> str:
        return self.path.name


def load_newest(
    run_dir: str | Path,
    *,
    accept: Callable[[dict[str, Any]], str | None] = lambda _meta: None,
    quarantine: bool = True,
) -> Loaded | None:
    """The newest checkpoint whose every byte is as written; None where there was never one.

    A damaged one is renamed to `<name>.bad.<n>` (not with `quarantine=False`, which is for
    readers beside a running job) and the one before is tried; `accept(meta)` may refuse one,
    left as it is, by returning the reason. Each is logged as a warning. Raises CheckpointError
    where checkpoints exist and none can be used, so that a run never silently starts over;
    OSError where that may be the storage's passing trouble.
    """
    for _ in range(3):  # once more if a running job prunes what we have just listed
        skipped: list[store.Unusable] = []
        vanished = False
        for name in filter(store.is_candidate, store.names(run_dir)):
            path = Path(run_dir) / store.CHECKPOINTS / name
            try:
                return _load(path, accept, skipped)
            except store.Unusable as unusable:
                if not os.path.lexists(path):
                    vanished = True
                    continue
                skipped.append(unusable)
                log.warning("checkpoint skipped: %s", unusable)
                if unusable.damaged and quarantine:
                    retention.quarantine(path)
        if not vanished:
            break
    if not store.names(run_dir):
        return None
    raise _none_valid(run_dir, skipped)


def _load(
    path: Path,
    accept: Callable[[dict[str, Any]], str | None],
    skipped: list[store.Unusable],
) -> Loaded:
    manifest = store.read_manifest(path)
    if reason := accept(manifest["meta"]):
        raise store.Unusable(path, reason, damaged=False)
    buffers = [torch.empty(shard["nbytes"], dtype=torch.uint8) for shard in manifest["shards"]]
    store.read_shards(path, manifest, [buffer.numpy().data for buffer in buffers])
    return Loaded(
        path, manifest["step"], manifest["generation"],
        tensors={name: view(buffers, entry) for name, entry in manifest["tensors"].items()},
        meta=manifest["meta"],
        nbytes=sum(buffer.numel() for buffer in buffers),
        skipped=tuple(map(str, skipped)),
    )  # fmt: skip


def _none_valid(run_dir: str | Path, skipped: list[store.Unusable]) -> Exception:
    """The error for checkpoints of which none can be used."""
    root = Path(run_dir) / store.CHECKPOINTS
    why = "; ".join(map(str, skipped)) or "all have been set aside as damaged (.bad)"
    for unusable in skipped:
        if unusable.transient:  # another try may find them whole: not the final exit code
            return OSError(errno.EIO, f"no checkpoint can be read: {why}", str(root))
    return CheckpointError(
        f"{root} has checkpoints, but none is valid: {why}. Put a good one back from a backup "
        f"(`gptddp checkpoints {run_dir} --verify` checks it), or move {root} away to start "
        "again from step 0"
    )
