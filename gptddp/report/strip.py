"""Draw what each rank was doing over time; the sums equal those of gptddp/run/owners.py."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gptddp.report.curves import MOST_LIVES
from gptddp.report.life_records import WorldRecord
from gptddp.report.run_record import RunRecord
from gptddp.run.owners import OWNERS, owner_of

COLUMNS = 360
MOST_ROWS = 32  # more ranks are drawn in groups
NOTHING = len(OWNERS)  # a pixel without a rank, or without data
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # one per pixel
_GAP_S = 1.0  # shorter gaps are ignored
_LEAST_S = 1e-3  # times are rounded to milliseconds
_LAST = 1e11  # unix seconds: later times are invalid
_LONG_STOP = 0.05  # fraction of all other time: longer stops are cut out of the picture


_Place = tuple[float, float, float]  # columns: from, to; unix seconds at the first


@dataclass
class Stretch:
    """Seconds of each rank by category, (OWNERS, ranks), between two times in unix seconds."""

    begin: float
    end: float
    seconds: np.ndarray


def draw(run: RunRecord) -> dict[str, Any] | None:
    """The picture for the page; None if no life has recorded its seconds.

    rows: the names of ranks or groups of ranks. cells: a text for each line of pixels, perRow lines
    for a row. pieces: from column, to column (with fractions), and the unix seconds at the first;
    between two pieces a stop may be cut out. width: of a column, in seconds.
    """
    every = [it for it in stretches(run) if it.begin < it.end < _LAST]
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
    pixels = _pixels(_shares(shown, placed, len(names), group), per_row)
    return {
        "rows": names,
        "perRow": per_row,
        "width": width,
        "pieces": _pieces(placed, width),
        "cells": ["".join(_DIGITS[it] for it in line) for line in pixels.tolist()],
        "owners": list(OWNERS),
        "lives": [[it.began, it.generation] for it in run.lives[-MOST_LIVES:]],
    }


# -- the seconds of each rank ----------------------------------------------------------------------


def stretches(run: RunRecord) -> list[Stretch]:
    """All stretches of the run, by time: the recorded ones of each world, then the unrecorded."""
    found: list[Stretch] = []
    for world, following in zip(run.worlds, [*run.worlds[1:], None], strict=False):
        sums = following.until_then if following else run.owners.so_far()
        rest = np.array([sums[it] - world.until_then[it] for it in OWNERS])
        until, before = world.began, np.zeros((len(OWNERS), world.world_size))
        for i, table in enumerate(world.tables):
            recorded = np.zeros_like(before)
            for phase, row in table.items():
                recorded[OWNERS.index(owner_of(phase, world.follows_fault))] += row
            # a rank that began later than rank 0 was still starting or joining
            later = OWNERS.index("recovery" if world.follows_fault else "start")
            recorded[later] += recorded[:, 0].sum() - recorded.sum(0)
            seconds = recorded - before  # below 0 if a second was moved to another phase
            rest -= seconds.sum(1)
            end = world.began + float(recorded[:, 0].sum())
            found += [Stretch(until, end, seconds)] if i else _in_order(until, end, seconds)
            until, before = end, recorded
        found += _unrecorded(world, following, until, rest)
    return found


def _in_order(begin: float, end: float, seconds: np.ndarray) -> list[Stretch]:
    """The first table of a world: the stretch before its steps, then the steps."""
    before = np.zeros_like(seconds)
    for activity in map(OWNERS.index, ("start", "recovery", "reload")):
        before[activity] = seconds[activity]
    middle = min(end, begin + float(before[:, 0].sum()))
    return [Stretch(begin, middle, before), Stretch(middle, end, seconds - before)]


def _unrecorded(
    world: WorldRecord, following: WorldRecord | None, until: float, rest: np.ndarray
) -> Iterator[Stretch]:
    """Seconds that are in no table: of this world's ranks, then of the next world's ranks."""
    between = [OWNERS.index(it) for it in ("recovery", "stopped")]
    own = np.maximum(rest, 0.0)
    own[between] = 0.0
    own = np.where(own > _LEAST_S, own, 0.0) / world.world_size
    if own.any():
        yield Stretch(until, until + own.sum(), np.repeat(own[:, None], world.world_size, axis=1))
    if following is not None:
        gap = np.zeros(len(OWNERS))
        gap[between] = np.maximum(rest[between], 0.0) / following.world_size
        if gap.sum() > _LEAST_S:
            end = following.began
            seconds = np.repeat(gap[:, None], following.world_size, axis=1)
            yield Stretch(end - gap.sum(), end, seconds)


# -- from seconds to pixels ------------------------------------------------------------------------


def _placed(shown: list[Stretch]) -> tuple[list[_Place], float]:
    """The places of the stretches, without gaps and overlaps; and the seconds per column."""
    found: list[_Place] = []
    at, until = 0.0, -np.inf
    for it in shown:
        begin = max(it.begin, until)
        until = max(begin, it.end)
        found.append((at, at + until - begin, begin))
        at += until - begin
    width = max(at, 1e-9) / COLUMNS
    return [(left / width, right / width, begin) for left, right, begin in found], width


def _shares(shown: list[Stretch], placed: list[_Place], rows: int, group: int) -> np.ndarray:
    """The share of each category in a column's time, (columns, OWNERS, rows)."""
    share = np.zeros((COLUMNS, len(OWNERS), rows))
    for it, (left, right, _) in zip(shown, placed, strict=True):
        padded = np.zeros((len(OWNERS), rows * group))
        padded[:, : it.seconds.shape[1]] = it.seconds
        rate = padded.reshape(len(OWNERS), rows, group).sum(2) / (it.end - it.begin) / group
        for column in range(int(left), min(COLUMNS, int(right) + 1)):
            share[column] += max(0.0, min(right, column + 1) - max(left, column)) * rate
    return share


def _pieces(placed: list[_Place], width: float) -> list[_Place]:
    """Join places without a gap between them; a column is `width` seconds."""
    found: list[_Place] = []
    for left, right, begin in placed:
        if found and abs(begin - found[-1][2] - (left - found[-1][0]) * width) < _GAP_S:
            found[-1] = (found[-1][0], right, found[-1][2])
        else:
            found.append((left, right, begin))
    return found


def _pixels(share: np.ndarray, per_row: int) -> np.ndarray:
    """Whole pixels: a rest that is too small for one is carried over to the next column."""
    columns, activities, rows = share.shape
    cells = np.full((rows, per_row, columns), NOTHING, dtype=np.uint8)
    due = np.zeros((activities + 1, rows))
    for column in range(columns):
        nothing = np.maximum(0.0, 1.0 - share[column].sum(0, keepdims=True))
        due += per_row * np.concatenate([share[column], nothing])
        for row in range(rows):
            taken = []
            for _ in range(per_row):
                most = int(due[:, row].argmax())
                due[most, row] -= 1
                taken.append(most)
            cells[row, :, column] = sorted(taken)
    return cells.reshape(rows * per_row, columns)
