"""Decisions to leave row groups out, as the ledger keeps them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Decision:
    """Row groups that are left out from a step on, by number and as `file#row group`."""

    row_groups: list[int]
    names: list[str]


def decided(decisions: Iterable[Mapping[str, Any]], step: int) -> dict[int, list[int]]:
    """What earlier lives decided from `step` finished steps on: {finished steps: row groups}."""
    found: dict[int, list[int]] = {}
    for decision in decisions:
        if decision["step"] >= step:
            found.setdefault(decision["step"], []).extend(decision["row_groups"])
    return found
