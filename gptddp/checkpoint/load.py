"""Load the newest valid checkpoint, and copy it into a model. Rank 0 only, except `copy_into`."""

import errno
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gptddp.checkpoint import retention, shard, store
from gptddp.checkpoint.layout import tensors_at
from gptddp.errors import CheckpointError, ConfigError, Unusable
from gptddp.files import patiently
from gptddp.run.branches import Branch, is_on
from gptddp.run.directory import CHECKPOINTS

log = logging.getLogger(__name__)


@dataclass
class SavedState:
    """A checkpoint, or the weights of a folder.

    The tensors, by name, are in CPU memory, mostly views of one buffer or file. There are none on a
    rank that gets them from another rank, or if the seed makes them.
    """

    name: str  # of the checkpoint, or of another source
    step: int = 0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)  # the rest of the state, see Progress
    generation: int = 0  # of the life that saved it


def load_newest(
    run_dir: str | Path,
    run_id: str | None = None,
    set_aside: bool = True,
    known: Collection[str] = (),
    branches: Sequence[Branch] = (),
    tell: Callable[[str], None] = lambda _: None,
    step: int | None = None,
) -> SavedState | None:
    """The newest checkpoint with every byte as written; None if there never was a checkpoint.

    A damaged checkpoint is renamed to `<name>.bad.<n>` (not with `set_aside=False`, for readers
    beside a running job) and the one before is tried, with a warning. A checkpoint that the run
    `run_id` cannot use is skipped but not renamed (None: only the bytes are checked). `known`:
    names to look for if the directory does not list them. `branches`: of the run; checkpoints that
    they discard are not used. `tell` gets how much was read. `step`: only of this step; ConfigError
    if it has none. Raises CheckpointError if checkpoints exist but none can be used, OSError if
    they may be readable later.
    """
    skipped: list[Unusable] = []
    names = [*filter(store.is_candidate, patiently(lambda: store.names(run_dir, known)))]
    for name in names if step is None else _of_step(run_dir, names, step):
        if not is_on(branches, *store.order(name)):
            continue
        path = Path(run_dir) / CHECKPOINTS / name
        try:
            return patiently(partial(load, path, run_id, tell))
        except Unusable as unusable:
            if not unusable.transient and name not in store.names(run_dir, known):  # pruned
                return load_newest(run_dir, run_id, set_aside, known, branches, tell, step)
            skipped.append(unusable)
            log.warning("checkpoint skipped: %s", unusable)
            if unusable.damaged and set_aside:
                retention.set_aside(path)
    if step is None and not patiently(lambda: store.names(run_dir)):
        return None
    raise _none_valid(run_dir, skipped, step)


def load(
    path: Path, run_id: str | None, tell: Callable[[str], None] = lambda _: None
) -> SavedState:
    """Load one checkpoint. Raises Unusable, CheckpointError for a newer version, OSError."""
    manifest = store.read_manifest(path)
    if reason := store.refused(manifest, run_id):
        raise Unusable(path, reason, damaged=False)
    entry = manifest["shards"][0]
    buffer = torch.empty(entry["nbytes"], dtype=torch.uint8)
    shard.read(path, entry, buffer.numpy().data, tell)
    try:
        tensors = tensors_at(buffer, manifest["tensors"])
    except ValueError as error:
        raise Unusable(path, f"{store.MANIFEST}: {error}") from None
    step, generation = manifest["step"], manifest["generation"]
    return SavedState(path.name, step, tensors, manifest["meta"], generation)


def _of_step(run_dir: str | Path, names: Sequence[str], step: int) -> list[str]:
    """The names of the checkpoints of a step. Raises ConfigError if there is none."""
    steps = {name: store.order(name)[1] for name in names}
    if step not in steps.values():
        there = ", ".join(map(str, sorted({*steps.values()}))) or "none"
        raise ConfigError(f"{run_dir} has no checkpoint of step {step}: use one of these: {there}")
    return [name for name in names if steps[name] == step]


def _none_valid(run_dir: str | Path, skipped: list[Unusable], step: int | None) -> Exception:
    """The error for a run whose checkpoints, or those of a step, are all unusable."""
    root = Path(run_dir) / CHECKPOINTS
    why = "; ".join(map(str, skipped)) or "all have been set aside as damaged (.bad)"
    for unusable in skipped:
        if unusable.transient:  # another try may succeed: not the final exit code
            what = "no checkpoint can" if step is None else f"the checkpoint of step {step} cannot"
            return OSError(errno.EIO, f"{what} be read: {why}", str(root))
    if step is not None:
        return CheckpointError(f"{run_dir}: {why}: use another step")
    return CheckpointError(
        f"{root} has checkpoints, but none is valid: {why}. Put a good one back from a backup "
        f"(`gptddp checkpoints {run_dir} --verify` checks it), or move {root} away and give "
        "--from-scratch to begin at step 0 again"
    )


@torch.no_grad()
def copy_into(live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into the live ones of the same names, shapes and dtypes.

    Raises CheckpointError if they differ: then the checkpoint is of another model.
    """
    for name in live.keys() | saved.keys():
        there, here = _kind(saved.get(name)), _kind(live.get(name))
        if there != here:
            raise CheckpointError(
                f"tensor {name} is {there} in the checkpoint and {here} in this model: "
                "the checkpoint has another configuration or vocabulary; give another --run-dir"
            )
    for name, tensor in live.items():
        tensor.copy_(saved[name])


def _kind(tensor: Tensor | None) -> Any:
    """Shape and dtype for a message."""
    return "absent" if tensor is None else (tuple(tensor.shape), tensor.dtype)
