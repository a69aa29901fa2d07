"""How far a run has come."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash


@dataclass
class Progress:
    """How far the run has come: with the tensors and the data position, all of its state."""

    step: int = 0  # finished optimizer steps
    tokens: int = 0  # trained targets
    chain_fp: int = 0  # folds the fingerprint of every step since the first
    train_s: float = 0.0  # seconds in steps, over all lives
    skipped: int = 0  # non-finite steps in a row
    data: dict[str, Any] = field(default_factory=dict)  # the loader's state after `step`

    def advance(
        self, targets: int, batch_fp: int, finite: bool, step_s: float, data: dict[str, Any]
    ) -> None:
        """Count one finished step. A skipped one has used its data like any other."""
        self.step += 1
        self.tokens += targets
        self.chain_fp = fold(self.chain_fp, batch_fp)
        self.train_s += step_s
        self.skipped = 0 if finite else self.skipped + 1
        self.data = data

    def to_meta(self) -> dict[str, Any]:
        """As JSON; 64-bit numbers as 16 hex digits."""
        return vars(self) | {"chain_fp": f"{self.chain_fp:016x}"}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> "Progress":
        """The inverse of to_meta; an empty mapping is the beginning of a run."""
        return cls(**{**meta, "chain_fp": int(meta["chain_fp"], 16)}) if meta else cls()


def fold(chain_fp: int, batch_fp: int) -> int:
    """The next chain fingerprint: a hash of the chain so far and the step's own."""
    both = chain_fp.to_bytes(8, "little") + batch_fp.to_bytes(8, "little")
    return int(xxhash.xxh3_64_intdigest(both))
