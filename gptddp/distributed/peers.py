"""Which peer a failed collective has failed for: gloo and NCCL tell that one is silent, not which.

Each rank whose collective fails notes in rank 0's store that it is there. After a timeout, those
that have not are the silent ones; where the store holds not even one's own note, rank 0 is.
"""

import contextlib
import re
import threading
import time
import traceback
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import torch.distributed as td

from gptddp.distributed import connect
from gptddp.distributed.connect import World
from gptddp.distributed.pulse import place
from gptddp.distributed.torch_private import LOST_PEER, default_store
from gptddp.errors import LostPeer

ROLL_CALL_S = 2.0  # for all ranks that wait in a collective to come out of it


def blame(error: BaseException, world: World, waited_s: float) -> tuple[str, str]:
    """Each rank whose collective has failed: which peer is silent, for how long, and in what.

    And where the trainer was, if nothing is known but that a connection was closed, else "": which
    rank was lost is for the next life to say (`known_lives.lost`).

    Takes ROLL_CALL_S after a timeout, and no time where a connection was closed: but for one that
    is closed `waited_s` after the last step, when a peer in an earlier collective has timed out.
    """
    with contextlib.suppress(td.DistError):  # a store that is gone cannot tell either
        default_store().set(f"here {world.rank}", "")
    text = str(error).splitlines()[0]
    timeout = re.search(r"(\d+) ?(ms\b|milliseconds)", text)
    if timeout is None and waited_s < 0.9 * connect.TIMEOUT_S:
        # "[gloo/.../pair.cc:553] Connection closed by peer [...]:1234. This is ...", behind other
        # words where it comes out of a bucket's future
        text = re.sub(r"^.*\[\S+\.cc:\d+\] ", "", text).split(". ")[0]
        place = _place(error)
        return f"{text} in {place}", place
    here: set[int] = set()
    listener = threading.Thread(target=_listen, args=(here, world), daemon=True)
    listener.start()  # a thread, as nothing limits torch's waiting for a store that is stopped
    listener.join(ROLL_CALL_S + 0.5)
    silent = [r for r in range(world.world_size) if r not in here] if world.rank in here else [0]
    if world.rank == 0:  # others may have begun later, and ask the store
        time.sleep(0.5)
    peers = ", ".join(world.names[rank] for rank in silent) or "a peer"
    have = "have" if len(silent) > 1 else "has"
    seconds = int(timeout[1]) / 1000 if timeout else int(waited_s)
    seconds = round(seconds) or seconds  # torch waits some milliseconds more
    return f"{peers} {have} not answered for {seconds:g} s in {_place(error)}", ""


def _listen(here: set[int], world: World) -> None:
    end = time.monotonic() + ROLL_CALL_S
    for rank in (world.rank, *range(world.world_size)):
        rest = timedelta(seconds=max(0.1, end - time.monotonic()))
        with contextlib.suppress(td.DistError):
            default_store().wait([f"here {rank}"], rest)
            here.add(rank)


def _place(error: BaseException) -> str:
    """Where the trainer was when a collective raised this."""
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    return place(of_trainer(frames) or frames[0])


def of_trainer(frames: Iterable[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The first of these that is this package's, but for the wrappers of collectives."""
    package = Path(__file__).parents[1]
    ours = (f for f in frames if Path(f.filename).is_relative_to(package))
    return next((f for f in ours if f.filename != connect.__file__), None)


def is_lost_peer(error: BaseException) -> bool:
    """Did a collective fail because another rank is gone or silent? Not this rank's own fault."""
    if isinstance(error, td.DistError | LostPeer):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    return any(words in text for words in LOST_PEER)
