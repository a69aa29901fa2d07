"""The ranks over time: who owned their seconds, when; in sum as gptddp/run/owners.py has it."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gptddp.report.lives import Life
from gptddp.report.read import Run
from gptddp.report.tables import of_rank_0, since
from gptddp.run.owners import OWNERS, owner_of

COLUMNS = 360
MOST_ROWS = 32  # more ranks are drawn in groups
NOBODY = len(OWNERS)  # a cell in which there was no such rank, or nothing is known
_GAP_S = 1.0  # less than this is no gap
_LEAST_S = 1e-3  # a millisecond: times are rounded to those
_LAST = 1e11  # unix seconds: what is later is no time
_LONG_STOP = 0.05  # of all other time: a longer one is cut out of the picture


_Place = tuple[float, float, float]  # where it is drawn, in columns: from, to; unix seconds there


@dataclass
class Span:
    """Seconds of each rank by owner, (owners, ranks), between two moments in unix seconds."""

    begin: float
    end: float
    seconds: np.ndarray


@dataclass
class Strip:
    """What is drawn.

    rows: the names of ranks, or of groups of them. cells: uint8 (rows * per_row, columns), an
    owner's number. pieces: from column to column (fractions count), and the unix seconds of the
    first; between two of them a stop may be cut out. width: of a column, in seconds.
    """

    rows: list[str]
    per_row: int
    cells: np.ndarray
    pieces: list[_Place]
    width: float


def spans(run: Run) -> list[Span]:
    """All of the run, in order of time: what the ranks have told, then what the ledger knows."""
    found: list[Span] = []
    lives = [it for it in run.lives if it.until_then and it.world_size]
    for life, following in zip(lives, [*lives[1:], None], strict=False):
        sums = following.until_then if following else run.owners.so_far()
        rest = np.array([sums[it] - life.until_then[it] for it in OWNERS])
        told, last = life.began, dict[str, np.ndarray]()
        for table in run.tables.of_life(life, run.is_over(life)):
            seconds = np.zeros((len(OWNERS), life.world_size))
            for phase, row in since(table, last).items():
                seconds[OWNERS.index(owner_of(phase, life.follows_fault))] += row
            if not last:  # a rank that began later than rank 0 was still being formed, or started
                later = of_rank_0(table) - sum(table.values())
                seconds[OWNERS.index("reforming" if life.follows_fault else "start")] += later
            rest -= seconds.sum(1)
            end = life.began + of_rank_0(table)
            found += _in_order(told, end, seconds) if not last else [Span(told, end, seconds)]
            told, last = end, table
        found += _untold(life, following, told, rest)
    return found


def _in_order(begin: float, end: float, seconds: np.ndarray) -> list[Span]:
    """The first table of a life: what comes before its steps, and then these."""
    before = np.zeros_like(seconds)
    for owner in map(OWNERS.index, ("start", "reforming", "reload")):
        before[owner] = seconds[owner]
    middle = min(end, begin + float(before[:, 0].sum()))
    return [Span(begin, middle, before), Span(middle, end, seconds - before)]


def _untold(life: Life, following: Life | None, told: float, rest: np.ndarray) -> Iterator[Span]:
    """What no rank has told: first of this life's ranks, then of those that waited to be a life."""
    between = [OWNERS.index(it) for it in ("reforming", "stopped")]
    own = np.maximum(rest, 0.0)
    own[between] = 0.0
    own = np.where(own > _LEAST_S, own, 0.0) / max(1, life.world_size)
    if own.any():
        yield Span(told, told + own.sum(), np.repeat(own[:, None], life.world_size, axis=1))
    if following is not None and following.world_size:
        gap = np.zeros(len(OWNERS))
        gap[between] = np.maximum(rest[between], 0.0) / following.world_size
        if gap.sum() > _LEAST_S:
            end = following.began
            yield Span(end - gap.sum(), end, np.repeat(gap[:, None], following.world_size, axis=1))


def draw(run: Run) -> Strip | None:
    """None where no life has told where its seconds went."""
    if not run.tells_seconds:
        return None
    every = [it for it in spans(run) if it.begin < it.end < _LAST]
    stopped = OWNERS.index("stopped")
    stops = [it for it in every if it.seconds[stopped].any()]
    rest = [it for it in every if not it.seconds[stopped].any()]
    if not rest:
        return None
    active = sum(it.end - it.begin for it in rest)
    shown = [*rest, *(it for it in stops if it.end - it.begin <= _LONG_STOP * active)]
    shown.sort(key=lambda it: it.begin)
    ranks = max(it.seconds.shape[1] for it in shown)
    group = -(-ranks // MOST_ROWS)
    names = [
        f"rank {first}" if group == 1 else f"ranks {first} to {min(first + group, ranks) - 1}"
        for first in range(0, ranks, group)
    ]
    placed, width = _placed(shown)
    per_row = max(3, min(12, 96 // len(names)))
    cells = _pixels(_shares(shown, placed, len(names), group), per_row)
    return Strip(names, per_row, cells, _pieces(placed, width), width)


def _placed(shown: list[Span]) -> tuple[list[_Place], float]:
    """One behind the other, with nothing in between, and none over another; seconds a column."""
    found: list[_Place] = []
    at, until = 0.0, -np.inf
    for span in shown:
        begin = max(span.begin, until)
        until = max(begin, span.end)
        found.append((at, at + until - begin, begin))
        at += until - begin
    width = max(at, 1e-9) / COLUMNS
    return [(left / width, right / width, begin) for left, right, begin in found], width


def _shares(shown: list[Span], placed: list[_Place], rows: int, group: int) -> np.ndarray:
    """The share of each owner in a column's time, (columns, owners, rows)."""
    share = np.zeros((COLUMNS, len(OWNERS), rows))
    for span, (left, right, _) in zip(shown, placed, strict=True):
        if right <= left:
            continue
        padded = np.zeros((len(OWNERS), rows * group))
        padded[:, : span.seconds.shape[1]] = span.seconds
        rate = padded.reshape(len(OWNERS), rows, group).sum(2) / (span.end - span.begin) / group
        for column in range(int(left), min(COLUMNS, int(right) + 1)):
            share[column] += max(0.0, min(right, column + 1) - max(left, column)) * rate
    return share


def _pieces(placed: list[_Place], width: float) -> list[_Place]:
    """The same, but those that follow without a gap are one; a column is `width` seconds."""
    found: list[_Place] = []
    for left, right, begin in placed:
        if found and abs(begin - found[-1][2] - (left - found[-1][0]) * width) < _GAP_S:
            found[-1] = (found[-1][0], right, found[-1][2])
        else:
            found.append((left, right, begin))
    return found


def _pixels(share: np.ndarray, per_row: int) -> np.ndarray:
    """Whole pixels: what is too little for one in a column is handed on to the next one."""
    columns, owners, rows = share.shape
    cells = np.full((rows, per_row, columns), NOBODY, dtype=np.uint8)
    due = np.zeros((owners + 1, rows))
    for column in range(columns):
        nobody = np.maximum(0.0, 1.0 - share[column].sum(0, keepdims=True))
        due += per_row * np.concatenate([share[column], nobody])
        for row in range(rows):
            taken = []
            for _ in range(per_row):
                most = int(due[:, row].argmax())
                due[most, row] -= 1
                taken.append(most)
            cells[row, :, column] = sorted(taken)
    return cells.reshape(rows * per_row, columns)
