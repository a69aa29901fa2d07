"""What the rows, views and proposals of launchers say; views.py has their meaning."""

import re
from typing import Any

Json = dict[str, Any]  # rows, views, proposals and members


def ids(view: Json | None) -> list[str]:
    """The ids of the members of a view or proposal, by rank."""
    return [member["id"] for member in view["members"]] if view else []


def number(view: Json | None) -> int:
    """The number of a view or proposal; 0 for none."""
    return view["number"] if view else 0


def key(proposal: Json) -> tuple[int, str]:
    """The identity of a proposal."""
    return proposal["number"], proposal["leader"]


def by_address(row: Json) -> list[Any]:
    """A key that sorts `x-2` before `x-10`."""
    return [int(p) if n % 2 else p for n, p in enumerate(re.split(r"(\d+)", row["address"]))]


def status(row: Json | None) -> str:
    """The status of an agent's worker; empty if it has no worker."""
    return row["member"]["status"] if row and row["member"] else ""


def is_member(row: Json) -> bool:
    """Is the agent's worker in the view of its row?"""
    return row["member"] is not None and row["member"]["id"] in ids(row["view"])
