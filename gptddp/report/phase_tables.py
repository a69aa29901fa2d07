"""Where the seconds of each rank went, life after life, as log and ledger have recorded it.

A table has the seconds of each rank since its start, by phase. Tables of one life only grow, so
that of a long run any may be left out, and the rest still adds up.
"""

from collections import defaultdict
from typing import Any

import numpy as np

from gptddp.report.life_records import LifeRecord

MOST_NUMBERS = 1 << 20  # of all tables that are kept

PhaseTable = dict[str, np.ndarray]  # by phase: seconds, float64 (ranks,)


class PhaseTables:
    """The tables of all lives, by generation, in the order of the log."""

    def __init__(self) -> None:
        self.by_life: dict[int, list[PhaseTable]] = defaultdict(list)
        self._numbers = 0

    def add(self, generation: int, phases: Any) -> None:
        """One more table; anything else changes nothing."""
        if table := _parsed(phases):
            self.by_life[generation].append(table)
            self._numbers += _size(table)
        if self._numbers > MOST_NUMBERS:  # leave every second out, but never the newest of a life
            for life, tables in self.by_life.items():
                self.by_life[life] = tables[-1::-2][::-1]
            self._numbers = sum(_size(it) for kept in self.by_life.values() for it in kept)

    def of_life(self, life: LifeRecord, is_over: bool) -> list[PhaseTable]:
        """Its tables with one number for each of its ranks, in order of time.

        Of a life that is over the last is the one by which its rank-seconds are counted.
        """
        last = _parsed(life.phases)
        known = [*self.by_life.get(life.generation, []), *([last] if last else [])]
        end = (of_rank_0(last) if last else 0.0) if is_over else np.inf
        found: list[PhaseTable] = []
        for table in sorted(known, key=of_rank_0):
            fits = all(len(row) == life.world_size for row in table.values())
            newer = of_rank_0(table) > (of_rank_0(found[-1]) if found else 0.0)
            if fits and newer and of_rank_0(table) <= end:
                found.append(table)
        return found


def _parsed(phases: Any) -> PhaseTable | None:
    """A table as log and ledger have it; None for anything else."""
    try:
        table = {str(name): np.array(row, dtype=np.float64) for name, row in phases.items()}
        rows = np.array(list(table.values()))
    except (AttributeError, TypeError, ValueError):
        return None
    return table if rows.ndim == 2 and rows.size and np.isfinite(rows).all() else None


def _size(table: PhaseTable) -> int:
    """How many numbers it has."""
    return sum(len(row) for row in table.values())


def of_rank_0(table: PhaseTable) -> float:
    """Seconds since the start of rank 0."""
    return float(sum(row[0] for row in table.values()))
