"""The progress of a run."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from gptddp.errors import CheckpointError

FINGERPRINT = re.compile("[0-9a-f]{16}", re.ASCII)  # 64 bits, as files have them


@dataclass
class Progress:
    """Progress and data position of a run: together with the tensors, its whole state."""

    step: int = 0  # finished optimizer steps
    tokens: int = 0  # trained targets
    chain_fp: int = 0  # folds the fingerprint of every step since the first
    train_s: float = 0.0  # seconds in steps and waiting for their data, over all lives
    skipped: int = 0  # non-finite steps in a row
    data: dict[str, Any] = field(default_factory=dict)  # the loader's state after `step`
    state_fp: int | None = None  # of all tensors after `step`; None: not computed

    def advance(
        self, targets: int, batch_fp: int, finite: bool, seconds: float, data: dict[str, Any]
    ) -> None:
        """Count one finished step. A skipped step also uses its data.

        `seconds`: of this rank, including its wait for data. `Life.agree` sets the sum to rank 0's
        on all ranks before any decision depends on it.
        """
        self.step += 1
        self.tokens += targets
        self.chain_fp = fold(self.chain_fp, batch_fp)
        self.train_s += seconds
        self.skipped = 0 if finite else self.skipped + 1
        self.data, self.state_fp = data, None

    def confirm(self, state_fp: int, source: str) -> None:
        """Set the fingerprint of the tensors that were read from `source`.

        Raises CheckpointError if the state was saved with another fingerprint.
        """
        if self.state_fp not in (None, state_fp):
            raise CheckpointError(
                f"the state of step {self.step}, from {source}, has the fingerprint "
                f"{state_fp:016x}, and was saved with {self.state_fp:016x}: its tensors have "
                "changed. Move it away: the run continues from an older checkpoint"
            )
        self.state_fp = state_fp

    def to_meta(self) -> dict[str, Any]:
        """As JSON; 64-bit numbers as 16 hex digits."""
        meta = vars(self) | {"chain_fp": f"{self.chain_fp:016x}"}
        if meta.pop("state_fp") is not None:
            meta["state_fp"] = f"{self.state_fp:016x}"
        return meta

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> "Progress":
        """The inverse of to_meta; an empty mapping gives the beginning of a run."""
        prints = {name: int(meta[name], 16) for name in _PRINTS if name in meta}
        return cls(**{**meta, **prints})


_PRINTS = ("chain_fp", "state_fp")


def fold(chain_fp: int, batch_fp: int) -> int:
    """The next chain fingerprint: a hash of the chain so far and the step's fingerprint."""
    both = chain_fp.to_bytes(8, "little") + batch_fp.to_bytes(8, "little")
    return int(xxhash.xxh3_64_intdigest(both))


# -- states of other versions ----------------------------------------------------------------------

_META = {
    "step": int,
    "tokens": int,
    "chain_fp": str,
    "train_s": int | float,
    "skipped": int,
    "data": dict,  # the loader checks its values
}


def wrong_meta(meta: Any) -> str | None:
    """The first invalid field of a state's meta, with the rule; None if all are valid."""
    if why := next(wrong(meta, _META, "meta"), None):
        return why
    if unknown := sorted(meta.keys() - _META.keys() - {"state_fp"}):
        return f"meta has {', '.join(unknown):.80}, which this version of gptddp does not know"
    for name in (it for it in _PRINTS if it in meta):
        if not FINGERPRINT.fullmatch(str(meta[name])):
            return f"meta.{name} is {meta[name]!r:.40}: it must be 16 hex digits"
    return None


def wrong(values: Any, kinds: Mapping[str, Any], where: str = "") -> Iterator[str]:
    """Yield each field of `kinds` that `values` lacks, or has with another type.

    Later fields may be invalid after the first error.
    """
    if not isinstance(values, dict):
        yield f"{where or 'it'} is {values!r:.40}: it must be an object"
        return
    for name, kind in kinds.items():
        path, value = f"{where}.{name}".lstrip("."), values.get(name)
        if name not in values:
            yield f"{path} is missing"
        elif not isinstance(value, kind):
            yield f"{path} is {value!r:.40}: it must be {getattr(kind, '__name__', kind)}"
