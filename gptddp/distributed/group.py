"""The process group of a world whose members come and go: made once, formed anew for each view.

torch's `_reconfigure` gives a group other members in the same process. What gloo needs to connect
them, an address of each, goes by the members' posts: no process hosts a store for the others.

Nothing of torch frees a rank from a collective whose peer is lost and not next to it: it waits for
the whole time limit. So the thread that hears of the loss shuts gloo's connections down (`cut`).
"""

import base64
import contextlib
import hashlib
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as td

from gptddp.distributed import pulse, torch_private
from gptddp.distributed.members import LeaseAsked, Members, Out, View
from gptddp.errors import Broken, LifeLost

FORM_S = 5.0  # for the others to come
_CONNECT_S = 0.6  # to connect to another; gloo waits five times as long for one to be connected
FREE_S = 5.0  # for the main thread to come out of a collective that is cut
_IDLE = 0.05  # of a CPU, which a thread that waits in a collective uses at most
_HANDLE, _ADDRESSES = "handle", "addresses"  # keys of posts


class Group:
    """The default process group, in a world of one until `form`. All but `cut`: the main thread."""

    def __init__(self, members: Members, device: torch.device, timeout_s: float) -> None:
        self.members, self._device = members, device
        self.view: View | None = None  # that it was last formed for, or tried to be
        self.tries = 0  # to form it before this one
        self._cut_at = 0.0  # monotonic; 0: not since the last `form`
        self._others: set[int] = set()  # sockets, by inode, that are not gloo's
        self._ours: set[int] | None = None  # gloo's; None while it connects: all that are new
        self._store = _Posted(self)  # the process group does not keep it alive
        td.init_process_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            rank=0,
            world_size=1,
            store=self._store,
            device_id=device if device.type == "cuda" else None,
            timeout=timedelta(seconds=timeout_s),
            enable_reconfigure=True,
        )
        self.alone()
        members.on_news = self._heard

    def alone(self) -> None:
        """A world of this process alone, for all that a joiner does before it is let in."""
        self.view = None
        self._reconfigure(int.from_bytes(os.urandom(7)), [torch_private.group_handle()])

    def form(self, view: View) -> None:
        """A world of the view's members; for the same view again: once more, with all of them.

        Raises Broken where that fails: by a loss, a newer view, or one that has not come in FORM_S.
        """
        again = self.view is not None and self.view.number == view.number
        self.tries = max(self.tries + 1 if again else 0, self._newest_attempt(view))
        self.view, self._cut_at = view, 0.0
        self._others, self._ours = set(_sockets().values()), None
        self._wait_for(lambda: set(view.ids) <= set(self.members.posts(_HANDLE)))
        handles = self.members.posts(_HANDLE)
        handles[self.members.me] = torch_private.group_handle()
        name = f"{view.number} {self.tries} {view.ids[0]}"
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
        try:
            self._reconfigure(number, [handles[it] for it in view.ids])
        except (RuntimeError, td.DistError) as error:
            raise Broken(
                self._why() or f"it cannot connect: {str(error).splitlines()[0]}"
            ) from error
        self._ours = set(_sockets().values()) - self._others
        if self.is_broken:
            self.cut()
            raise Broken(self._why())

    def next_view(self, limit_s: float) -> View | LeaseAsked | Out | None:
        """What follows the last view: see `Members.next_view`; None where it is lost, and nothing
        has come yet.

        The last view once more, to be formed again, where another member does so, or where nobody
        is lost: then no more than connections were.
        """
        after, mine = (self.view.number if self.view else 0), self.members

        def again() -> bool:
            return self.is_broken and not (self.view and mine.is_over(self.view))

        found = mine.wait_for(lambda: mine.next_view(after, 0.0) or again(), limit_s)
        if isinstance(found, bool):
            return self.view if self.view and not mine.is_over(self.view) else None
        return found

    @property
    def is_broken(self) -> bool:
        """Is the world of the last `form` over: by a loss, or as a member forms it once more?"""
        return self.view is not None and (
            self.members.is_over(self.view) or self._newest_attempt(self.view) > self.tries
        )

    def cut(self) -> None:
        """Any thread: break the collective that the main thread is in, and that of its neighbours.

        A listener that is shut down ends the process, so only what has a peer is.
        """
        self._cut_at = self._cut_at or time.monotonic()
        if self._device.type == "cuda":
            td.group.WORLD.abort()  # type: ignore[union-attr]
        for fd, inode in _sockets().items():
            if inode in self._others if self._ours is None else inode not in self._ours:
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as ours:
                if os.fstat(ours.fileno()).st_ino == inode and ours.family != socket.AF_UNIX:
                    ours.getpeername()
                    ours.shutdown(socket.SHUT_RDWR)

    def _heard(self) -> None:
        """In the thread that reads what the launcher says."""
        if self.view and not self._cut_at and self.is_broken:
            self.cut()
            threading.Thread(target=self._leave, args=(self._cut_at,), daemon=True).start()

    def _leave(self, cut_at: float) -> None:
        """End the process if its main thread does not come out of the collective that was cut.

        gloo forgets a sender about once in 100 cuts. It comes back as another member.
        """
        idle_since, cpu_s = time.monotonic(), 0.0
        while self._cut_at == cut_at:
            time.sleep(FREE_S / 10)
            before, cpu_s = cpu_s, _main_cpu_s()
            now = time.monotonic()
            if not pulse.in_collective(pulse.main_frames()) or cpu_s - before > _IDLE * FREE_S / 10:
                idle_since = now
            if now - idle_since > FREE_S and self._cut_at == cut_at:
                print("gptddp: gloo does not let go of a broken collective", file=sys.stderr)
                sys.stderr.flush()
                os._exit(LifeLost.exit_code)

    # -- by the members' posts ---------------------------------------------------------------------

    def addresses(self, key: str) -> bytes | None:
        """What gloo has left under this key in the present `form`, in any of the processes."""
        for number, attempt, values in self._posted().values():
            if (number, attempt) == self._now() and key in values:
                return base64.b64decode(values[key])
        return None

    def leave_address(self, key: str, value: bytes) -> None:
        """Let all processes know it."""
        number, attempt = self._now()
        mine = self._posted().get(self.members.me)
        values = mine[2] if mine and (mine[0], mine[1]) == (number, attempt) else {}
        encoded = base64.b64encode(value).decode()
        self.members.post(_ADDRESSES, [number, attempt, {**values, key: encoded}])

    def wait_for_addresses(self, keys: list[str]) -> None:
        """Raises Broken where they do not come."""
        self._wait_for(lambda: all(self.addresses(it) for it in keys))

    def _wait_for(self, there: Callable[[], bool]) -> None:
        self.members.wait_for(lambda: self.is_broken or there(), FORM_S)
        if self.is_broken or not there():
            raise Broken(self._why() or f"not all have come in {FORM_S:g} s")

    def _now(self) -> tuple[int, int]:
        return (self.view.number, self.tries) if self.view else (0, 0)

    def _posted(self) -> dict[str, Any]:
        return self.members.posts(_ADDRESSES)

    def _newest_attempt(self, view: View) -> int:
        posted = self._posted()
        attempts = [
            posted[it][1] for it in view.ids if it in posted and posted[it][0] == view.number
        ]
        return max(attempts, default=0)

    def _why(self) -> str:
        lost = self.members.lost_of(self.view) if self.view else []
        pods = ", ".join(it.pod or it.id[:8] for it in lost)
        return f"{pods} lost" if pods else "the world is formed anew" if self.is_broken else ""

    def _reconfigure(self, number: int, handles: list[str]) -> None:
        torch_private.reconfigure(number, handles, timedelta(seconds=_CONNECT_S))
        self.members.post(_HANDLE, torch_private.group_handle())


class _Posted(td.Store):  # type: ignore[name-defined,misc]
    """What gloo uses of torch's key-value store, by the members' posts."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def set(self, key: str, value: bytes) -> None:
        self._group.leave_address(key, value)

    def get(self, key: str) -> bytes:
        self._group.wait_for_addresses([key])
        return self._group.addresses(key) or b""

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._group.wait_for_addresses(keys)

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Of rank 0 alone, to find that a number is used twice: ours never is."""
        return value


def _sockets() -> dict[int, int]:
    """The inode of each socket of this process, by its descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            about = os.fstat(int(name))
            if stat.S_ISSOCK(about.st_mode):
                found[int(name)] = about.st_ino
    return found


def _main_cpu_s() -> float:
    """CPU seconds of the main thread."""
    with open(f"/proc/self/task/{os.getpid()}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
