"""What a life can go on from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class SavedState:
    """A checkpoint, or the weights of a folder.

    The tensors, by name, are in CPU memory, mostly views of one buffer or file; there are none on a
    rank that gets them from another, and none where the seed makes them.
    """

    name: str  # of the checkpoint, or what else it is
    step: int = 0
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)  # all else of the state, see Progress
    generation: int = 0  # of the life that saved it
