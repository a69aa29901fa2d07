"""A collective that has failed: for a lost peer or by a mistake of ours, and for which peer."""

import contextlib
import re
import threading
import time
import traceback

import torch.distributed as td

from gptddp.distributed import connect
from gptddp.distributed.connect import World
from gptddp.distributed.pulse import of_trainer, place
from gptddp.distributed.torch_private import LOST_PEER
from gptddp.errors import LostPeer

ROLL_CALL_S = 2.0  # for all ranks that wait in a collective to come out of it


def is_lost_peer(error: BaseException) -> bool:
    """Did a collective fail because another rank is gone or silent? Not this rank's own fault."""
    if isinstance(error, td.DistError | LostPeer):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    return any(words in text for words in LOST_PEER)


def said(error: BaseException) -> str:
    """What torch says of it in its first line, without the place in its own sources.

    "[gloo/.../pair.cc:553] Connection closed by peer [...]:1234. This is ...", behind other words
    where it comes out of a bucket's future.
    """
    return re.sub(r"^.*\[\S+\.cc:\d+\] ", "", str(error).splitlines()[0]).split(". ")[0]


def blame(error: BaseException, world: World, waited_s: float) -> str:
    """Each rank whose collective has failed: what it says, or which peer was silent, and where.

    A mesh knows who was lost. In a static world, gloo and NCCL tell that a peer is silent, not
    which: after a timeout all post that they are there. So do those whose connection was closed
    `waited_s` after the last step, when a peer in an earlier collective has timed out. That takes
    ROLL_CALL_S.
    """
    text = str(error).splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    where = place(of_trainer(frames) or frames[0])
    timeout = re.search(r"(\d+) ?(ms\b|milliseconds)", text)
    if world.is_static:
        with contextlib.suppress(td.DistError):  # a store that is gone cannot tell either
            world.post("here", True)
    if not world.is_static or (timeout is None and waited_s < 0.9 * connect.TIMEOUT_S):
        return f"{said(error)} in {where}"
    here: set[int] = set()

    def listen() -> None:
        time.sleep(ROLL_CALL_S)
        with contextlib.suppress(td.DistError):
            here.update(world.posted("here"))

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()  # a thread, as nothing limits torch's waiting for a store that is stopped
    listener.join(ROLL_CALL_S + 0.5)
    silent = [r for r in range(world.world_size) if r not in here] if world.rank in here else [0]
    if world.rank == 0:  # others may have begun later, and ask the store
        time.sleep(0.5)
    peers = ", ".join(world.names[rank] for rank in silent) or "a peer"
    have = "have" if len(silent) > 1 else "has"
    seconds = int(timeout[1]) / 1000 if timeout else int(waited_s)
    seconds = round(seconds) or seconds  # torch waits some milliseconds more
    return f"{peers} {have} not answered for {seconds:g} s in {where}"
