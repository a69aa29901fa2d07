"""Tensors and a checkpoint's bytes: one flat layout to stage them in, and the verified load.

`writer.py` saves what is staged here; both are for rank 0 only.
"""

import errno
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptddp.checkpoint import retention, store
from gptddp.checkpoint.layout import view
from gptddp.errors import CheckpointError, Unusable

log = logging.getLogger(__name__)


# -- one flat layout ---------------------------------------------------------------------------


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
        skipped: list[Unusable] = []
        vanished = False
        for name in filter(store.is_candidate, store.names(run_dir)):
            path = Path(run_dir) / store.CHECKPOINTS / name
            try:
                return _load(path, accept, skipped)
            except Unusable as unusable:
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
    skipped: list[Unusable],
) -> Loaded:
    manifest = store.read_manifest(path)
    if reason := accept(manifest["meta"]):
        raise Unusable(path, reason, damaged=False)
    buffers = [torch.empty(shard["nbytes"], dtype=torch.uint8) for shard in manifest["shards"]]
    store.read_shards(path, manifest, [buffer.numpy().data for buffer in buffers])
    return Loaded(
        path, manifest["step"], manifest["generation"],
        tensors={name: view(buffers, entry) for name, entry in manifest["tensors"].items()},
        meta=manifest["meta"],
        nbytes=sum(buffer.numel() for buffer in buffers),
        skipped=tuple(map(str, skipped)),
    )  # fmt: skip


def _none_valid(run_dir: str | Path, skipped: list[Unusable]) -> Exception:
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


@torch.no_grad()
def copy_into(live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into the live ones of the same names, shapes and dtypes.

    Raises CheckpointError when they are not the same: then the checkpoint is another model's.
    """
    for name in live.keys() | saved.keys():
        kinds = [(tuple(t.shape), t.dtype) if (t := d.get(name)) is not None else "absent"
                 for d in (saved, live)]  # fmt: skip
        if kinds[0] != kinds[1]:
            raise CheckpointError(
                f"tensor {name} is {kinds[0]} in the checkpoint and {kinds[1]} in this model: "
                "it belongs to another configuration or vocabulary; give another --run-dir"
            )
    for name, tensor in live.items():
        tensor.copy_(saved[name])
