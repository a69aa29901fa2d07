"""The process group of a world whose members change: made once, and formed again for each view.

torch's `_reconfigure` gives a group other members in the same process. gloo needs the addresses of
all members: they travel in the members' posts, so no process hosts a store for the others.

In a collective with a lost peer that is not its neighbour, a rank waits for the whole time limit:
torch cannot interrupt it. So the thread that learns of a loss shuts gloo's connections (`cut`).
"""

import base64
import contextlib
import hashlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from stat import S_ISSOCK
from typing import Any

import torch
import torch.distributed as td

from gptddp.distributed import pulse, torch_private
from gptddp.distributed.environment import ranks
from gptddp.distributed.members import AT, Members, View
from gptddp.distributed.process import stat
from gptddp.errors import Broken, LifeLost

_CONNECT_S = 0.6  # to connect; gloo waits five times as long for others to connect to it
FREE_S = 2.0  # for the main thread to leave a collective that is cut
_SLICE_S = 0.05  # of a wait; if gloo stands still for that long, the collective is given up
_WORKERS = "pt_gloo_runloop"  # torch's name for the threads of gloo that do collectives
_BEAT_S = 1.0  # between two beats of the pulse in a wait for others
_HANDLE = "handle"  # key of a post


class Group:
    """The default process group, in a world of one until `form`. All but `cut`: the main thread."""

    def __init__(self, members: Members, device: torch.device, timeout_s: float) -> None:
        self.members, self._device = members, device
        self.view: View | None = None  # of the last `form`, also of a failed one
        self._cut_at = 0.0  # monotonic; 0: not cut since the last `form`
        self._cutting = threading.Lock()  # a cut of one world must not hit the next
        self._others: set[int] = set()  # inodes of sockets that are not gloo's
        self._ours: set[int] | None = None  # gloo's; None while it connects: all new ones
        self._store = _Posted(self)  # the process group does not keep it alive
        self._timeout_s = timeout_s  # of a collective
        self._forgotten: list[Any] = []  # collectives that were given up
        self._kept: list[tuple[Any, list[Any]]] = []  # earlier process groups, and theirs
        self._open()
        members.on_news = self._heard

    def _open(self) -> None:
        more: dict[str, Any] = {"store": self._store, "enable_reconfigure": True}
        initialise(self._device, self._timeout_s, rank=0, world_size=1, **more)
        self.alone()

    def set_timeout(self, seconds: float) -> None:
        """How long a collective waits for a silent peer before it fails."""
        self._timeout_s = seconds
        td.set_timeout(timedelta(seconds=seconds))

    def alone(self) -> None:
        """A world of this process alone, for the work of a joining rank before it is admitted."""
        with self._cutting:
            self.view, self._cut_at = None, 0.0
        if self._forgotten:
            self._renew()
            return
        self._reconfigure(int.from_bytes(os.urandom(7)), [torch_private.group_handle()])

    def form(self, view: View) -> None:
        """Form the world of the view's members, as soon as all of them have arrived here.

        Raises Broken if that fails: another view follows (`Members.is_over`), or must be
        requested (`Members.broken`).
        """
        if self._forgotten:
            self._renew()
        with self._cutting:  # from now on, a cut is for this world
            self._others, self._ours = set(_sockets().values()), None
            self.view, self._cut_at = view, 0.0
        self.wait_for(lambda: set(view.ids) <= set(self.members.posts(_HANDLE)))
        handles = self.members.posts(_HANDLE)
        handles[self.members.me] = torch_private.group_handle()
        name = f"{view.number} {view.ids[0]}"
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
        try:
            self._reconfigure(number, [handles[it] for it in view.ids])
        except RuntimeError as error:
            if isinstance(error, Broken):
                raise
            line = str(error).splitlines()[0]
            raise Broken(self._why() or f"not all members can be connected: {line}") from error
        self._ours = set(_sockets().values()) - self._others
        if self.is_broken:
            self.cut()
            raise self._broken()

    def wait(self, work: Any) -> None:
        """Wait until a collective of the main thread is over. Raises its error, or Broken.

        gloo forgets half sent and half received data when its connection closes: a cut during sums
        of 1 MB one after another does this in one of 8 to 16 processes. A thread of gloo then
        sleeps until the time limit, and fails. It writes no more into the tensors, because it
        sleeps and no connection remains to wake it. So this thread gives the collective up, and
        continues.
        """
        stand = ""
        while self._device.type == "cpu" and not work.is_completed():
            before, stand = stand, self._standstill()
            if self._forgotten or (stand and stand == before):
                self._forgotten.append(work)
                raise self._broken()
            with contextlib.suppress(RuntimeError):  # mostly the time limit of this call only
                work.wait(timedelta(seconds=_SLICE_S))
        work.wait()

    def _standstill(self) -> str:
        """The CPU time of gloo's threads, if all sleep and have no connection any more; else ""."""
        if not self._cut_at or self._ours is None or self._ours & set(_sockets().values()):
            return ""
        used = []
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/comm") as name:
                if name.read().strip() == _WORKERS:
                    used.append(_asleep(task))
        return ", ".join(used) if all(used) else ""

    def _renew(self) -> None:
        """Make another process group, because one or both threads of this one sleep.

        The old group is kept until its collectives end: its destructor waits for its threads.
        """
        self._kept = [it for it in self._kept if not all(work.is_completed() for work in it[1])]
        self._kept.append((td.group.WORLD, self._forgotten))
        self._forgotten = []
        td.destroy_process_group()
        self._open()

    @property
    def is_broken(self) -> bool:
        """Is the world of the last `form` over?"""
        return self.view is not None and self.members.is_over(self.view)

    def cut(self) -> None:
        """Any thread: break the collective of the main thread, and that of its neighbours.

        Only sockets with a peer are shut down: shutting down a listener would end the process.
        """
        for fd, inode in _sockets().items():
            if inode in self._others if self._ours is None else inode not in self._ours:
                continue
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as ours:
                if os.fstat(ours.fileno()).st_ino == inode and ours.family != socket.AF_UNIX:
                    ours.getpeername()
                    ours.shutdown(socket.SHUT_RDWR)

    def _heard(self) -> None:
        """In the thread that reads the launcher's messages: cut a world that is over."""
        with self._cutting:
            if self._cut_at or not self.is_broken:
                return
            cut_at = self._cut_at = time.monotonic()
            self.cut()
        threading.Thread(target=self._leave, args=(cut_at,), daemon=True).start()

    def _leave(self, cut_at: float) -> None:
        """End the process if its main thread does not leave the collective that was cut.

        The launcher starts it again, as a new member.
        """
        if self._device.type == "cuda":
            td.group.WORLD.abort()  # type: ignore[union-attr]
        since, cpu = time.monotonic(), ""
        while self._cut_at == cut_at:
            time.sleep(FREE_S / 10)
            with self._cutting:
                if self._cut_at == cut_at:
                    self.cut()  # connections made since
            before, cpu = cpu, _asleep(os.getpid())
            waits = self._ours is not None and pulse.in_collective(pulse.main_frames())
            if not waits or not cpu or cpu != before:  # while it forms, gloo has a limit
                since = time.monotonic()
            if time.monotonic() - since > FREE_S and self._cut_at == cut_at:
                what = f"[rank {ranks().rank}] a broken collective does not let go of this process"
                print(f"{what}: it ends, and a new worker replaces it", file=sys.stderr, flush=True)
                os._exit(LifeLost.exit_code)

    def check(self) -> None:
        """Raise Broken if the world of the last `form` is over."""
        if self.is_broken:
            raise self._broken()

    def wait_for(self, there: Callable[[], bool]) -> None:
        """Wait without a limit: a member may be in a long step. Raises Broken."""
        while not self.members.wait_for(lambda: self.is_broken or there(), _BEAT_S):
            pulse.beat()
        self.check()

    def _broken(self) -> Broken:
        # `_why` is empty if a new view has just ended the launcher's request for the lease
        return Broken(self._why() or "the world has changed")

    def _why(self) -> str:
        lost = self.members.lost_of(self.view) if self.view else []
        who = ", ".join(it.pod or f"worker {it.id[:8]}" for it in lost)
        return f"lost {who}" if who else "the world has changed" if self.is_broken else ""

    def _reconfigure(self, number: int, handles: list[str]) -> None:
        torch_private.reconfigure(number, handles, timedelta(seconds=_CONNECT_S))
        self.members.post(_HANDLE, torch_private.group_handle())


class _Posted(td.Store):  # type: ignore[name-defined,misc]
    """The part of torch's key-value store that gloo uses, by the members' posts."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        self._group = group

    def set(self, key: str, value: bytes) -> None:
        """Post a value for the others. With the first value, this process has arrived."""
        members, view = self._group.members, self._group.view
        number = view.number if view else 0
        of, values = members.posts(AT).get(members.me, [0, {}])
        kept = values if of == number and number else {}
        members.post(AT, [number, {**kept, key: base64.b64encode(value).decode()}])

    def get(self, key: str) -> bytes:
        """The value that a process has posted, once all have arrived. Raises Broken."""
        members, view = self._group.members, self._group.view
        number, ids = (view.number, view.ids) if view else (0, [members.me])

        def arrived() -> list[dict[str, str]]:
            posts = members.posts(AT)
            return [posts[it][1] for it in ids if it in posts and posts[it][0] == number]

        def there() -> bool:
            return len(arrived()) == len(ids) and any(key in it for it in arrived())

        self._group.wait_for(there)
        return base64.b64decode(next(it[key] for it in arrived() if key in it))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Used by rank 0 to find a number that is used twice, which never happens here."""
        return value


def _sockets() -> dict[int, int]:
    """The inode of each socket of this process, by its descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            about = os.fstat(int(name))
            if S_ISSOCK(about.st_mode):
                found[int(name)] = about.st_ino
    return found


def _asleep(task: int | str) -> str:
    """The CPU time of this thread, if it sleeps now; else ""."""
    fields = stat(f"self/task/{task}")
    return " ".join(fields[11:13]) if fields[:1] == ["S"] else ""


def initialise(device: torch.device, timeout_s: float, **more: Any) -> None:
    """Make the default process group, by torch's back-end for the device."""
    cuda = device.type == "cuda"
    backend, of = ("nccl", device) if cuda else ("gloo", None)
    timeout = timedelta(seconds=timeout_s)
    td.init_process_group(backend=backend, device_id=of, timeout=timeout, **more)
