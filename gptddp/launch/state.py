"""The state of the rendezvous as JSON: the agents of the world, those that wait, and the round.

Times are no part of it but for the deadline of the last call: a sign of life is a key of its own,
see `shared_state.py`.
"""

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any

from gptddp.distributed.torch_private_elastic import Node, RendezvousState
from gptddp.files import parse_json

_FIELDS = {
    "seq": int,
    "round": int,
    "complete": bool,
    "closed": bool,
    "deadline": str | None,
    "participants": dict,
    "waiting": list,
    "redundant": list,
}


def encode(state: RendezvousState, seq: int, deadline: datetime | None) -> str:
    """Compact JSON. `seq`: how many states have been written before; agents go by addresses."""
    value = {
        "seq": seq,
        "round": state.round,
        "complete": state.complete,
        "closed": state.closed,
        "deadline": deadline.isoformat() if deadline else None,
        "participants": {node.addr: rank for node, rank in state.participants.items()},
        "waiting": _addresses(state.wait_list),
        "redundant": _addresses(state.redundancy_list),
    }
    return json.dumps(value, separators=(",", ":"), sort_keys=True)


def decode(text: str, most: int = 1 << 62) -> tuple[RendezvousState, int]:
    """The state and its `seq`. Raises ValueError for what `encode` cannot have written.

    `most`: of any number, of which JSON has longer ones than Python writes.
    """
    value = parse_json(text)
    if not isinstance(value, dict) or value.keys() != _FIELDS.keys():
        raise ValueError("not the fields of a rendezvous' state")
    for name, kind in _FIELDS.items():
        if not isinstance(value[name], kind) or kind is int and isinstance(value[name], bool):
            raise ValueError(f"{name} is no {kind}")
    ranks = value["participants"].values()
    listed = [*value["waiting"], *value["redundant"]]
    if not all(type(rank) is int for rank in ranks) or not all(type(a) is str for a in listed):
        raise ValueError("ranks are numbers, and agents go by addresses")
    if not all(map(str.isprintable, [*value["participants"], *listed])):
        raise ValueError("an address that cannot be one")  # nor encoded, as a lone surrogate
    if not all(abs(number) < most for number in (value["seq"], value["round"], *ranks)):
        raise ValueError("a number that no job reaches")
    state = RendezvousState()
    state.round, state.complete, state.closed = value["round"], value["complete"], value["closed"]
    state.participants = {Node(a, 0, 0): rank for a, rank in value["participants"].items()}
    state.wait_list = {Node(a, 0, 0) for a in value["waiting"]}
    state.redundancy_list = {Node(a, 0, 0) for a in value["redundant"]}
    if value["deadline"]:
        state.deadline = datetime.fromisoformat(value["deadline"])
        if state.deadline.tzinfo is None:
            raise ValueError("the deadline has no time zone")
    return state, value["seq"]


def nodes_of(state: RendezvousState) -> set[Any]:
    """All agents of a state."""
    return {*state.participants, *state.wait_list, *state.redundancy_list}


def _addresses(nodes: Iterable[Any]) -> list[str]:
    return sorted(node.addr for node in nodes)
