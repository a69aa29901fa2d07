"""Describe how a life continued with other ranks, from its event `world`."""

from collections.abc import Mapping
from typing import Any

from gptddp.errors import visible


def lost(event: Mapping[str, Any]) -> str:
    """The lost ranks of the previous world, with pod and cause."""
    return "; ".join(f"{_name(it)}: {visible(it['how'])}" for it in event["lost"])


def moved(event: Mapping[str, Any]) -> str:
    """The lost ranks, the new ranks, the number of ranks now, and the duration."""
    parts = [f"lost {it}"] if (it := lost(event)) else []
    if come := ", ".join(map(_name, event["joined"])):
        parts.append(f"joined by {come}")
    ranks = "1 rank" if event["world_size"] == 1 else f"{event['world_size']} ranks"
    return f"{', '.join(parts) or 'reconnected'}; {ranks} go on after {event['pause_s']:.2f} s"


def _name(it: Mapping[str, Any]) -> str:
    return f"rank {it['rank']} ({it['pod']})" if it["pod"] else f"rank {it['rank']}"
