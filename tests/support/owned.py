"""Checks that every rank-second of a run has an owner."""

from pathlib import Path

import pytest

from gptddp.run import summary
from gptddp.run.history import read_ledger


def owned(run: Path) -> dict[str, float]:
    """The rank-seconds of a run by owner, as its ledger says."""
    return summary.read(run).owners.so_far()


def check_nobodys(run: Path) -> dict[str, float]:
    """Assert that at most 1 % of a run's rank-seconds have no owner; return all by owner."""
    found = owned(run)
    assert min(found.values()) >= 0, found
    assert found["other"] <= 0.01 * sum(found.values()), (run, found)
    return found


def check_owners(run: Path, most: float) -> None:
    """Assert that hardly any rank-seconds have no owner, and that none are negative.

    They must add up to the ranks times the elapsed time, and to no more than `most`, which holds
    for clocks that jump too.
    """
    found = check_nobodys(run)
    total = sum(found.values())
    assert total <= 1.01 * most, found
    elapsed = elapsed_rank_s(run)
    if elapsed <= most:  # else a clock has jumped
        assert total == pytest.approx(elapsed, rel=0.01), found


def elapsed_rank_s(run: Path) -> float:
    """Ranks times time, up to the recorded end. Between two worlds, the second's ranks count."""
    total, began, world, last = 0.0, None, 0, 0.0
    for event in read_ledger(run):
        kind = event["event"]
        if kind == "start" or (kind == "world" and began is not None and event["at"] > began):
            now, last = event["time"] - event.get("seconds", 0.0), event.get("at", last)
            if began is not None:
                total += world * (last - began) + event["world_size"] * (now - last)
            began, world, last = now, event["world_size"], now
        elif kind in ("stop", "end"):
            last = event.get("at", event["time"])
    return total + world * (last - began) if began is not None else 0.0
