"""Failed collectives: by a lost peer or by an error of this code, and which peer is lost."""

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

ROLL_CALL_S = 2.0  # for all ranks in a collective to leave it


def is_lost_peer(error: BaseException) -> bool:
    """Did a collective fail because another rank is lost or silent, and not by an own error?"""
    if isinstance(error, td.DistError | LostPeer):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    return any(words in text for words in LOST_PEER)


def said(error: BaseException) -> str:
    """The first line of torch's message, without the place in torch's sources.

    "[gloo/.../pair.cc:553] Connection closed by peer [...]:1234. This is ...", after other words if
    it comes from a bucket's future.
    """
    return re.sub(r"^.*\[\S+\.cc:\d+\] ", "", str(error).splitlines()[0]).split(". ")[0]


def blame(error: BaseException, world: World, waited_s: float) -> str:
    """Each rank with a failed collective: the error, or the silent peers, and the place.

    A mesh knows the lost member. In a static world, gloo and NCCL report a silent peer without its
    rank: so after a timeout every living rank posts a sign of life. So does a rank whose connection
    was closed when `waited_s` since the last step is almost the limit: a peer has timed out in an
    earlier collective. That takes ROLL_CALL_S.
    """
    text = str(error).splitlines()[0]
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    where = place(of_trainer(frames) or frames[0])
    timeout = re.search(r"(\d+) ?(ms\b|milliseconds)", text)
    if world.is_static:
        with contextlib.suppress(td.DistError):  # the store may be lost, too
            world.post("here", True)
    if not world.is_static or (timeout is None and waited_s < 0.9 * connect.TIMEOUT_S):
        return f"{said(error)} in {where}"
    here: set[int] = set()

    def listen() -> None:
        time.sleep(ROLL_CALL_S)
        with contextlib.suppress(td.DistError):
            here.update(world.posted("here"))

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()  # a thread: torch waits without limit for a stopped store
    listener.join(ROLL_CALL_S + 0.5)
    silent = [r for r in range(world.world_size) if r not in here] if world.rank in here else [0]
    if world.rank == 0:  # others may have begun later, and ask the store
        time.sleep(0.5)
    peers = ", ".join(world.names[rank] for rank in silent) or "a peer"
    have = "have" if len(silent) > 1 else "has"
    seconds = int(timeout[1]) / 1000 if timeout else int(waited_s)
    seconds = round(seconds) or seconds  # torch waits some milliseconds more
    return f"{peers} {have} not answered for {seconds:g} s in {where}"
