"""Where the seconds of each rank went, life after life, as log and ledger have told it.

A table has the seconds of each rank since its start, by phase. Tables of one life only grow, so
that of a long run any may be left out, and the rest still adds up.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from gptddp.report.lives import Life
from gptddp.run.owners import Owners

MOST_NUMBERS = 1 << 20  # of all tables that are kept

Table = dict[str, np.ndarray]  # by phase: seconds, float64 (ranks,)


class Tables:
    """The tables of all lives, by generation, in the order in which they were told."""

    def __init__(self) -> None:
        self.of: dict[int, list[Table]] = {}
        self._numbers = 0

    def add(self, generation: int, phases: Mapping[str, Any]) -> None:
        """One more table; what is none changes nothing."""
        if (table := parse(phases)) is None:
            return
        self.of.setdefault(generation, []).append(table)
        self._numbers += size(table)
        if self._numbers > MOST_NUMBERS:
            self._halve()

    def _halve(self) -> None:
        """Leave every second one out, but never the newest of a life."""
        for life, tables in self.of.items():
            self.of[life] = tables[-1::-2][::-1]
        self._numbers = sum(size(it) for tables in self.of.values() for it in tables)

    def of_life(self, life: Life, is_over: bool) -> list[Table]:
        """Its tables with one number for each of its ranks, in order of time.

        Of a life that is over the last is the one by which its rank-seconds are counted.
        """
        last = parse(life.phases)
        known = [*self.of.get(life.generation, []), *([last] if last else [])]
        end = (of_rank_0(last) if last else 0.0) if is_over else np.inf
        found: list[Table] = []
        for table in sorted(known, key=of_rank_0):
            fits = all(len(row) == life.world_size for row in table.values())
            newer = of_rank_0(table) > (of_rank_0(found[-1]) if found else 0.0)
            if fits and newer and of_rank_0(table) <= end:
                found.append(table)
        return found

    def tell(self, owners: Owners) -> None:
        """Have the sum of the ledger know what the log says of the newest life, as metrics do."""
        for table in self.of.get(owners.generation, [])[-1:]:
            phases = {name: row.tolist() for name, row in table.items()}
            event = {"event": "checkpoint", "generation": owners.generation, "phases": phases}
            owners.add(event)


def parse(phases: Any) -> Table | None:
    """A table as log and ledger have it; None for anything else."""
    if not isinstance(phases, dict) or not phases:
        return None
    try:
        table = {str(name): np.array(row, dtype=np.float64) for name, row in phases.items()}
    except (TypeError, ValueError):
        return None
    shapes = {row.shape for row in table.values()}
    right = (
        len(shapes) == 1
        and len(*shapes) == 1
        and all(np.isfinite(it).all() for it in table.values())
    )
    return table if right else None


def size(table: Table) -> int:
    """How many numbers it has."""
    return sum(len(row) for row in table.values())


def of_rank_0(table: Table) -> float:
    """Seconds since the start of rank 0."""
    return float(sum(row[0] for row in table.values())) if table else 0.0


def since(table: Table, before: Table) -> Table:
    """What has come to it since; a second that was given to another phase is taken from neither."""
    return {name: np.maximum(row - before.get(name, 0.0), 0.0) for name, row in table.items()}
