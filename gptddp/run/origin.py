"""What one life of a run begins with."""

from dataclasses import dataclass
from typing import Any

from gptddp.config import Config


@dataclass(frozen=True)
class Origin:
    """Where a life of the run goes on from: the same on every rank."""

    config: Config  # resolved
    changes: list[dict[str, Any]]  # field, old, new: what the life before had other than `config`
    generation: int
    step: int  # finished steps
    meta: dict[str, Any]  # of the state, see Progress; {} when the run begins
    source: str  # the checkpoint's name, "memory" or "scratch"
    redo: int  # steps that an earlier life has done beyond `step`
    last_line: dict[str, Any] | None  # of the log, by any life
    line: dict[str, Any] | None  # of `step`, there
    run_id: str  # of this run directory's content, unique for ever
    parent: str | None  # the checkpoint that this life descends from
    snapshot_rank: int | None  # the one whose snapshot this life goes on from
    late: str | None  # the checkpoint that a launcher makes of a snapshot meanwhile
    quarantine: dict[
        int, list[int]
    ]  # what earlier lives decided beyond `step`, see run/quarantine.py
