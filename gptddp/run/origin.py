"""The state from which one life of a run starts."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gptddp.config import Config
from gptddp.errors import BadMessage, ConfigError
from gptddp.flags import from_saved


@dataclass(frozen=True)
class Origin:
    """The start of one life, equal on every rank."""

    config: Config  # resolved
    generation: int
    step: int  # finished steps
    source: str  # the checkpoint's name, "memory" or "scratch"
    run_id: str  # unique for the content of this run directory
    redo: int = 0  # steps that an earlier life did beyond `step`
    line: dict[str, Any] | None = None  # the log line of `step`
    parent: str | None = None  # the checkpoint that this life descends from
    # row groups that earlier lives excluded beyond `step`, by step
    quarantine: dict[int, list[int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The JSON object that rank 0 sends to the other ranks."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {
            "config": dataclasses.asdict(self.config),
            "quarantine": sorted(self.quarantine.items()),
        }

    @classmethod
    def from_json(cls, values: Any) -> "Origin":
        """The inverse of `to_json`. Raises BadMessage for invalid values."""
        if not (isinstance(values, Mapping) and values.keys() == _KINDS.keys()):
            raise BadMessage("rank 0", f"an origin without the fields {', '.join(_KINDS)}")
        for name, kinds in _KINDS.items():
            if type(values[name]) not in kinds:
                raise BadMessage("rank 0", f"an origin with {name} {values[name]!r:.80}")
        try:
            config = from_saved("the configuration of rank 0", values["config"])
            quarantine = {int(at): [*map(int, groups)] for at, groups in values["quarantine"]}
        except (ConfigError, TypeError, ValueError, OverflowError) as error:
            raise BadMessage("rank 0", f"an origin with invalid values ({error})") from None
        return cls(**{**values, "config": config, "quarantine": quarantine})


_NONE = type(None)
_KINDS: dict[str, tuple[type, ...]] = {
    "config": (dict,),
    "generation": (int,),
    "step": (int,),
    "source": (str,),
    "redo": (int,),
    "line": (dict, _NONE),
    "run_id": (str,),
    "parent": (str, _NONE),
    "quarantine": (list,),
}
