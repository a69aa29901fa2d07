"""What a life can go on from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class SavedState:
    """A checkpoint, what a rank has left in memory, or the weights of a folder.

    The tensors, by name, are in CPU memory, mostly views of one buffer or file; there are none on a
    rank that gets them from another, and none where the seed makes them.
    """

    name: str  # of the checkpoint, or what else it is
    step: int = 0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)  # all else of the state, see Progress
    generation: int = 0  # of the life that saved it

    # with what a rank has left in memory
    run_id: str = ""
    lines: list[dict[str, Any]] = field(default_factory=list)  # that the log may lack
    events: list[dict[str, Any]] = field(default_factory=list)  # that the ledger may lack
    fault: dict[str, Any] | None = None  # why it was left: cause, and time in unix seconds
    digest: int = 0  # of the tensors' bytes
    layout: dict[str, Any] = field(default_factory=dict)  # of the tensors, as in a checkpoint
    data: memoryview = memoryview(b"")  # their bytes, as in a checkpoint
