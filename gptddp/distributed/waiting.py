"""Rank 0 works and the others wait: rank 0 posts its progress and its end, and the others read it.

Only rank 0 reads the storage, and a storage may take any time. In a collective, a peer that still
reads looks like a peer that hangs. So rank 0 posts its progress, and the others wait as long as the
posts change. The death of rank 0 is noticed at once.
"""

import contextlib
import time
from collections.abc import Callable, Iterator

import torch.distributed as td

from gptddp import live
from gptddp.distributed import pulse
from gptddp.distributed.storage import Said
from gptddp.errors import LostPeer

Tell = Callable[[str], None]  # takes the present work of rank 0, and its progress
Post = Callable[[str, str], None]  # takes the same, and how the work ended: "" before its end

TELL_S = 1.0  # between two posts
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.005, 0.25
_SHOWN = 200  # characters of a line
_WELL = "ended well"


def teller(post: Post) -> Tell:
    """Rank 0 only: a function to call with the present work; it costs almost nothing.

    Text after a comma is progress, which is posted only every TELL_S.
    """
    said = Said("[rank 0] this life begins")
    next_s, last = 0.0, ""  # monotonic

    def tell(doing: str) -> None:
        nonlocal next_s, last
        what = doing.split(",")[0]
        if what != last or time.monotonic() >= next_s:
            next_s, last = time.monotonic() + TELL_S, what
            pulse.beat()
            post(doing, "")
            said.update(doing)
            live.phase(doing, drawn_only=True)

    return tell


@contextlib.contextmanager
def ended(post: Post) -> Iterator[None]:
    """Rank 0 only, around its work: post its end for the others, with the error if it failed."""
    try:
        yield
    except Exception as error:  # the others need not wait for this process's end
        post("", f"{type(error).__name__}: {error}")
        raise
    post("", _WELL)


def wait_for_end(
    look: Callable[[], tuple[str, str]], name: str, limit_s: float, said: Said
) -> None:
    """All ranks but 0: wait until the work of rank 0, called `name`, is over.

    `look`: the posted work and end of rank 0. Raises LostPeer if rank 0 has failed or is lost,
    or has made no progress for `limit_s`. In a static world `look` does not return while rank 0 is
    stopped: then the pulse ends this process.
    """
    doing, moved = "starting", time.monotonic()
    try:
        while not (seen := look())[1]:
            pulse.beat()
            now = time.monotonic()
            if seen[0] and (line := _line(seen[0])) != doing:
                doing, moved = line, now
            said.update(doing)
            if now - moved > limit_s:
                raise LostPeer(f"{name} has made no progress for {limit_s:g} s: {doing}")
            time.sleep(min(max(_SHORTEST_POLL_S, (now - said.began) / 20), _LONGEST_POLL_S))
    except td.DistError as error:
        raise LostPeer(f"{name} is lost ({_line(str(error))}) while {doing}") from error
    if seen[1] != _WELL:
        raise LostPeer(f"{name} has failed: {_line(seen[1])}")


def _line(text: str) -> str:
    """The first line of a peer's text, safe for a terminal."""
    first = text.splitlines()[0] if text else ""
    return "".join(filter(str.isprintable, first))[:_SHOWN]
