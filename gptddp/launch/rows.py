"""The shape of what launchers say to each other: `views.py` and the workers rely on it.

Who has the key may be of another version. What cannot be understood ends its own connection, and
never the mesh of the one that hears it.
"""

from typing import Any

from gptddp.distributed.members import AT
from gptddp.launch.links import split

_MOST = 1 << 53  # of a number
_LONGEST = 300  # characters of an address
_MEMBER = {"id": str, "pod": str, "agent": str}
_VIEW = {
    "number": int,
    "leader": str,
    "base": int,
    "by": str,
    "root": str,
    "members": [_MEMBER],
    "gone": [{"id": str, "pod": str, "how": str}],
}
_ROW = {
    "agent": str,
    "address": str,
    "member": ({"id": str, "pod": str, "status": str}, None),
    "ended": {...: str},
    "dead": {...: str},
    "view": (_VIEW, None),
    "accepted": [_VIEW],
    "proposal": (_VIEW, None),
    "broken": int,
    "hears": [str],
}


def check_row(said: Any) -> None:
    """A frame with a row and addresses. Raises ValueError."""
    if not _fits(said, {"row": _ROW, "peers": [str]}):
        raise ValueError("no row that this version knows")
    if len(said["row"]["address"]) > _LONGEST:
        raise ValueError("no address")
    split(said["row"]["address"])


def check_posts(posts: Any) -> None:
    """What a worker has posted. Raises ValueError."""
    at = posts["values"].get(AT, [0]) if _fits(posts, {"id": str, "values": {...: ...}}) else None
    if not (isinstance(at, list) and at and _fits(at[0], int)):
        raise ValueError("no posts that this version knows")


def _fits(value: Any, shape: Any) -> bool:
    """Is it so? `...` is anything, a tuple has alternatives; a dict may have more than its keys."""
    if isinstance(shape, tuple):
        return any(_fits(value, one) for one in shape)
    if isinstance(shape, list):
        return isinstance(value, list) and all(_fits(one, shape[0]) for one in value)
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return False
        if ... in shape:
            return all(_fits(one, shape[...]) for one in value.values())
        return all(name in value and _fits(value[name], shape[name]) for name in shape)
    if shape is int:
        return type(value) is int and 0 <= value < _MOST
    return shape is ... or value is shape or (shape is str and isinstance(value, str))
