"""How far a run has come."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import xxhash

from gptddp.errors import CheckpointError

FINGERPRINT = re.compile("[0-9a-f]{16}", re.ASCII)  # 64 bits, as files have them


@dataclass
class Progress:
    """How far the run has come: with the tensors and the data position, all of its state."""

    step: int = 0  # finished optimizer steps
    tokens: int = 0  # trained targets
    chain_fp: int = 0  # folds the fingerprint of every step since the first
    train_s: float = 0.0  # seconds in steps and waiting for their data, over all lives
    skipped: int = 0  # non-finite steps in a row
    data: dict[str, Any] = field(default_factory=dict)  # the loader's state after `step`
    state_fp: int | None = None  # of all tensors after `step`, where it has been computed

    def advance(
        self, targets: int, batch_fp: int, finite: bool, seconds: float, data: dict[str, Any]
    ) -> None:
        """Count one finished step. A skipped one has used its data like any other.

        `seconds`: of this rank, its wait for the data included. `Life.agree` makes rank 0's of the
        sum on all ranks, before anything is decided by it.
        """
        self.step += 1
        self.tokens += targets
        self.chain_fp = fold(self.chain_fp, batch_fp)
        self.train_s += seconds
        self.skipped = 0 if finite else self.skipped + 1
        self.data, self.state_fp = data, None

    def confirm(self, state_fp: int, source: str) -> None:
        """The fingerprint of the tensors that were read from `source`.

        Raises CheckpointError where the state was saved with another one.
        """
        if self.state_fp not in (None, state_fp):
            raise CheckpointError(
                f"the state of step {self.step}, from {source}, has the fingerprint "
                f"{state_fp:016x}, and was saved with {self.state_fp:016x}: its tensors are not "
                "those of the run; move it away, and the run goes on from an older one"
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
        """The inverse of to_meta; an empty mapping is the beginning of a run."""
        prints = {name: int(meta[name], 16) for name in _PRINTS if name in meta}
        return cls(**{**meta, **prints})


_PRINTS = ("chain_fp", "state_fp")


def fold(chain_fp: int, batch_fp: int) -> int:
    """The next chain fingerprint: a hash of the chain so far and the step's own."""
    both = chain_fp.to_bytes(8, "little") + batch_fp.to_bytes(8, "little")
    return int(xxhash.xxh3_64_intdigest(both))


# -- what was written by another version, or by hand -----------------------------------------------

_META: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "tokens": (int,),
    "chain_fp": (str,),
    "train_s": (int, float),
    "skipped": (int,),
    "data": (dict,),
}
_POSITION: dict[str, tuple[type, ...]] = {  # of the loader; their values are its own to judge
    "version": (int,),
    "pack": (str,),
    "dataset": (str,),
    "tokenizer": (str,),
    "seq_len": (int,),
    "seed": (int,),
    "batch": (int,),
    "lanes": (str,),
}
_WORDS = {int: "a whole number", float: "a number", str: "text", list: "a list", dict: "an object"}
_CURSORS = re.compile(r"\d{1,18}(\.\d{1,18}){2}( \d{1,18}(\.\d{1,18}){2})*", re.ASCII)


def wrong_meta(meta: Any) -> str | None:
    """The first field of a state's meta that cannot be used, with the rule; None: all can be."""
    return next(_wrong_meta(meta), None)


def _wrong_meta(meta: Any) -> Iterator[str]:
    yield from wrong(meta, _META, "meta")
    if unknown := sorted(meta.keys() - _META.keys() - {"state_fp"}):
        yield f"meta has {', '.join(unknown):.80}, which this gptddp does not know"
    for name in (it for it in _PRINTS if it in meta):
        if not (isinstance(meta[name], str) and FINGERPRINT.fullmatch(meta[name])):
            yield f"meta.{name} is {meta[name]!r:.40}: it must be 16 hex digits"
    data = meta["data"]
    yield from wrong(data, _POSITION, "meta.data")
    if not _CURSORS.fullmatch(data["lanes"]):
        yield f"meta.data.lanes is {data['lanes']!r:.40}: it must be epoch.block.row for each lane"
    if not isinstance(library := data.get("library", ""), str):
        yield f"meta.data.library is {library!r:.40}: it must be text"
    groups = data.get("quarantined", [])
    if not (isinstance(groups, list) and all(type(it) is int and it >= 0 for it in groups)):
        yield f"meta.data.quarantined is {groups!r:.40}: it must be a list of row groups"


def wrong(values: Any, kinds: Mapping[str, tuple[type, ...]], where: str = "") -> Iterator[str]:
    """Each of these fields that `values` has not, or not as one of its kinds; a number below 0.

    Who reads on after the first may meet anything.
    """
    if not isinstance(values, dict):
        yield f"{where or 'it'} is {values!r:.40}: it must be an object"
        return
    for name, allowed in kinds.items():
        field_name, value = f"{where}.{name}".lstrip("."), values.get(name)
        if name not in values:
            yield f"{field_name} is missing"
        elif type(value) not in allowed:
            yield f"{field_name} is {value!r:.40}: it must be {_WORDS[allowed[-1]]}"
        elif isinstance(value, int | float) and not 0 <= value < math.inf:
            yield f"{field_name} is {value}: it must be a number of at least 0"
