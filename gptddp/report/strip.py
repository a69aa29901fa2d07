"""The ranks over time: who owned their seconds, when; in sum as gptddp/run/owners.py has it."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from gptddp.report.lives import Life, is_fault, number
from gptddp.report.read import Run
from gptddp.report.tables import of_rank_0, since
from gptddp.run.owners import OWNERS, owner_of

COLUMNS = 360
MOST_ROWS = 32  # more ranks are drawn in groups
NOBODY = len(OWNERS)  # a cell in which there was no such rank, or nothing is known
_LONG_STOP = 0.05  # of all other time: a longer one is cut out of the picture


@dataclass
class Span:
    """Seconds of each rank by owner, (owners, ranks), between two moments in unix seconds."""

    begin: float
    end: float
    seconds: np.ndarray


@dataclass
class Strip:
    """What is drawn.

    rows: the names of ranks, or of groups of them. times: of the columns' middles, unix seconds.
    cells: uint8 (rows * per_row, columns), an owner's number. breaks: stops that are cut out.
    """

    rows: list[str]
    per_row: int
    times: list[float]
    cells: np.ndarray
    breaks: list[tuple[float, float]]


def spans(run: Run) -> list[Span]:
    """All of the run, in order of time."""
    found: list[Span] = []
    for life, following in pairwise([*run.lives, None]):
        assert life is not None
        before = [it for it in run.lives if it.generation < life.generation]
        fault = bool(before) and is_fault(before[-1], life)
        told = life.began
        last: dict[str, np.ndarray] = {}
        over = following is not None or life.stop is not None
        for table in run.tables.of_life(life.generation, life.world_size, over):
            end = life.began + of_rank_0(table)
            seconds = np.zeros((len(OWNERS), life.world_size))
            for phase, row in since(table, last).items():
                seconds[OWNERS.index(owner_of(phase, fault))] += row
            if not last:  # a rank that began later than rank 0 was still being formed, or started
                later = of_rank_0(table) - sum(table.values())
                seconds[OWNERS.index("reforming" if fault else "start")] += later
            found.append(Span(told, end, seconds))
            told, last = end, table
        found += _after(life, following, told)
    return found


def _after(life: Life, following: Life | None, told: float) -> Iterator[Span]:
    """From the last word of a life to the beginning of the next one."""
    until = following.began if following else None
    if life.stop:
        ended = max(told, number(life.stop["time"]))
        yield _all(told, ended, "checkpoint", life.world_size)
        if following and until is not None:
            owner = "reforming" if is_fault(life, following) else "stopped"
            yield _all(ended, until, owner, following.world_size)
    elif following and until is not None:
        end = life.end or {}
        noticed = min(max(told, number(end.get("at")) or told), max(told, until))
        owner = "detection" if end.get("phases") else "training"
        yield _all(told, noticed, owner, life.world_size)
        yield _all(noticed, until, "reforming", following.world_size)


def _all(begin: float, end: float, owner: str, ranks: int) -> Span:
    """The same of all ranks."""
    seconds = np.zeros((len(OWNERS), ranks))
    seconds[OWNERS.index(owner)] = max(0.0, end - begin)
    return Span(begin, end, seconds)


def draw(run: Run) -> Strip | None:
    """None where no life has told where its seconds went."""
    if not any(run.tables.of.values()):
        return None
    every = [it for it in spans(run) if it.end > it.begin]
    stopped = OWNERS.index("stopped")
    stops = [it for it in every if it.seconds[stopped].any()]
    rest = [it for it in every if not it.seconds[stopped].any()]
    if not rest:
        return None
    active = sum(it.end - it.begin for it in rest)
    breaks = [(it.begin, it.end) for it in stops if it.end - it.begin > _LONG_STOP * active]
    shown = sorted([*rest, *(it for it in stops if (it.begin, it.end) not in breaks)], key=_begin)
    ranks = max(it.seconds.shape[1] for it in shown)
    group = -(-ranks // MOST_ROWS)
    names = [
        f"rank {first}" if group == 1 else f"ranks {first} to {min(first + group, ranks) - 1}"
        for first in range(0, ranks, group)
    ]
    share, times = _columns(shown, len(names), group)
    per_row = max(3, min(12, 96 // len(names)))
    return Strip(names, per_row, times, _pixels(share, per_row), breaks)


def _begin(span: Span) -> float:
    return span.begin


def _columns(shown: list[Span], rows: int, group: int) -> tuple[np.ndarray, list[float]]:
    """The share of each owner in a column's time, (columns, owners, rows), and the columns' times.

    The columns are of the time that is shown, one piece behind the other.
    """
    pieces: list[tuple[float, float, float]] = []  # where drawn, and from when to when
    at = 0.0
    for span in shown:
        begin = max(span.begin, pieces[-1][2] if pieces else span.begin)
        pieces.append((at, begin, max(begin, span.end)))
        at += max(0.0, span.end - begin)
    width = max(at, 1e-9) / COLUMNS
    share = np.zeros((COLUMNS, len(OWNERS), rows))
    for span, (left, begin, end) in zip(shown, pieces, strict=True):
        if end <= begin:
            continue
        padded = np.zeros((len(OWNERS), rows * group))
        padded[:, : span.seconds.shape[1]] = span.seconds
        rate = padded.reshape(len(OWNERS), rows, group).sum(2) / (end - begin)
        right = left + end - begin
        for column in range(int(left / width), min(COLUMNS, int(right / width) + 1)):
            inside = min(right, (column + 1) * width) - max(left, column * width)
            share[column] += max(0.0, inside) / width * rate
    lefts = np.array([it[0] for it in pieces])
    middles = (np.arange(COLUMNS) + 0.5) * width
    of = np.maximum(np.searchsorted(lefts, middles, side="right") - 1, 0)
    times = [pieces[i][1] + (middle - pieces[i][0]) for i, middle in zip(of, middles, strict=True)]
    return share / group, [float(it) for it in times]


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
