"""Rank 0 works and the others wait: they read in its store what it does, and that it has ended.

Rank 0 alone reads the storage, and a storage may take any time. In a collective, a peer that reads
on looks like one that hangs. So rank 0 leaves in the store how far it is, and the others wait for
as long as that changes. A rank 0 that dies closes the store's connections: they notice at once.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import torch.distributed as td

from gptddp.distributed import pulse
from gptddp.distributed.storage import Said
from gptddp.errors import LostPeer

Tell = Callable[[str], None]  # takes what rank 0 does now, and how far it is

TELL_S = 1.0  # between two lines in the store
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.005, 0.25
_SHOWN = 200  # characters of a line
_WELL = "ended well"


class Store(Protocol):
    """What is used of torch's key-value store. Raises DistError where its host is gone."""

    def set(self, key: str, value: str) -> None:
        """Give the key a value."""

    def get(self, key: str) -> bytes:
        """The key's value, which must be there."""

    def check(self, keys: list[str]) -> bool:
        """Are all keys there?"""


def teller(store: Store, key: str, alone: bool = False) -> Tell:
    """Rank 0 only: a function to call with the present work; it costs next to nothing.

    What comes after a comma is how far it is, which is passed on every TELL_S only.
    """
    said = Said("[rank 0] this life begins" if alone else "[rank 0] the other ranks wait")
    next_s, last = 0.0, ""  # monotonic

    def tell(doing: str) -> None:
        nonlocal next_s, last
        what = doing.split(",")[0]
        if what != last or time.monotonic() >= next_s:
            next_s, last = time.monotonic() + TELL_S, what
            pulse.beat()
            store.set(f"{key} doing", doing)
            said.update(doing)

    return tell


@contextlib.contextmanager
def ended(store: Store, key: str) -> Iterator[None]:
    """Rank 0 only, around its work: when it is over, the others hear of it, and of its failure."""
    try:
        yield
    except Exception as error:  # they need not wait for the end of this process
        store.set(key, f"{type(error).__name__}: {error}")
        raise
    store.set(key, _WELL)


def wait_for_end(
    store: Store,
    key: str,
    name: str,
    limit_s: float,
    said: Said,
    answered: Callable[[], None] = lambda: None,
) -> None:
    """All ranks but 0: wait until the work of rank 0, called `name`, is over.

    Raises LostPeer where rank 0 has failed or is gone, and where it has got no further for
    `limit_s`. A store whose host is stopped never answers: the caller limits that time, and is told
    of each answer.
    """
    doing, moved = "starting", time.monotonic()
    next_look = moved + TELL_S
    try:
        while not store.check([key]):
            answered()
            pulse.beat()
            now = time.monotonic()
            if now >= next_look:
                next_look = now + TELL_S
                before, doing = doing, _doing(store, key) or doing
                moved = moved if doing == before else now
                said.update(doing)
            if now - moved > limit_s:
                raise LostPeer(f"{name} has got no further for {limit_s:g} s: {doing}")
            time.sleep(min(max(_SHORTEST_POLL_S, (now - said.began) / 20), _LONGEST_POLL_S))
        how = store.get(key).decode("utf-8", "replace")
    except td.DistError as error:
        raise LostPeer(f"{name} is gone ({_line(str(error))}); it was {doing}") from error
    if how != _WELL:
        raise LostPeer(f"{name} has failed by {_line(how)}")


def _doing(store: Store, key: str) -> str:
    has = store.check([f"{key} doing"])
    return _line(store.get(f"{key} doing").decode("utf-8", "replace")) if has else ""


def _line(text: str) -> str:
    """One line that a terminal may be shown: a peer has sent it."""
    first = text.splitlines()[0] if text else ""
    return "".join(filter(str.isprintable, first))[:_SHOWN]
