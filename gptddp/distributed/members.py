"""The other workers of the job, as this process's launcher reports them over its Unix socket.

The launchers agree on the world (launch/mesh.py): a *view*, with a number and the members by rank.
This is the worker's side. A thread reads the launcher's messages at any time, so that a loss breaks
the collective of the main thread.
"""

import contextlib
import json
import math
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gptddp.errors import LifeLost, LostPeer, visible

# Silence of a launcher until the others continue without it; it counts only while they run.
SILENT_S = 4.0
ATTACH_S = 30.0  # for the launcher's first message
# reasons of an orderly leave, after a collective by which the others know it
TOLD, AT_END = IN_ORDER = "told to stop", "the run has come to its end"
# Wait before gloo's connections are cut, after a member has left in order or arrived at the next
# view: it may have completed the last collective, and the others then complete it in this time.
ARRIVED_S = 1.0
AT = "at"  # key of a post (see `post`): [number of the view at which its member is, ...]

T = TypeVar("T")


class Member(NamedTuple):
    """A worker process in the mesh."""

    id: str
    pod: str  # the name of its pod, "" outside a pod


class Gone(NamedTuple):
    """A member of an earlier view that is not in this one."""

    id: str
    pod: str
    how: str  # how it was lost, or why it left


class View(NamedTuple):
    """The members of the world, by rank."""

    number: int
    by: str  # "first", "quorum" or "lease": the ground of its commit
    members: tuple[Member, ...]
    gone: tuple[Gone, ...]

    @property
    def ids(self) -> list[str]:
        """The ids of its members, by rank."""
        return [it.id for it in self.members]


class LeaseAsked(NamedTuple):
    """The launcher asks for the run's lease before it commits a view; answer it."""

    number: int
    how: str  # "tie" or "minority"


class Out(NamedTuple):
    """The others continue without this process; `rejoin` makes it a new member."""

    number: int


class Members:
    """The connection to the launcher, from the first attach to the end of the process.

    `on_news` is called in the reading thread after each of its messages.
    """

    def __init__(self, path: Path, pod: str) -> None:
        """Raises LostPeer if the launcher does not answer."""
        self.on_news: Callable[[], None] = lambda: None
        self._pod = pod
        self._changed = threading.Condition(threading.RLock())
        self._looks_again = False  # a thread waits to call `on_news` again
        self._sending = threading.Lock()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise LostPeer(f"the launcher does not answer at {path}: {error}") from error
        threading.Thread(target=self._read, name="members", daemon=True).start()
        self.rejoin()

    def rejoin(self) -> None:
        """Become a new member, with a new id and no posts; its status is "starting".

        Raises LostPeer if the launcher does not answer.
        """
        with self._changed:
            self.me = uuid.uuid4().hex
            self.view: View | None = None
            self.is_going = False  # a world to join exists
            self.least, self.most = 0, 0  # fewest members, and members that the job asks for
            self._posts: dict[str, dict[str, Any]] = {}
            self._arrived: dict[str, float] = {}  # monotonic: arrival of each at its newest view
            self._left: dict[str, float] = {}  # monotonic: orderly leave of each
            self._lost: set[str] = set()
            self._asked: LeaseAsked | None = None
            self._out: Out | None = None
        self._send({"attach": {"id": self.me, "pod": self._pod}})
        if not self.wait_for(lambda: self.least, ATTACH_S):
            raise LostPeer(f"the launcher has sent nothing for {ATTACH_S:g} s")

    # -- messages of this process ------------------------------------------------------------------

    def status(self, status: str) -> None:
        """Report this member's status: starting; fresh: ready for a first view; warm: ready to join
        a running world; going: it has the state.
        """
        self._send({"status": status})

    def post(self, key: str, value: Any) -> None:
        """Send a small value to all members, here at once; it lasts as long as this member."""
        with self._changed:
            self._posts.setdefault(self.me, {})[key] = value
            self._changed.notify_all()
        self._send({"post": [key, value]})

    def answer(self, asked: LeaseAsked) -> None:
        """Report that this process holds the run's lease now."""
        with self._changed:
            if self._asked == asked:
                self._asked = None
        self._send({"lease": asked.number})

    def broken(self, view: View) -> None:
        """Request another view: the group of this one has failed without a known loss."""
        self._send({"broken": view.number})

    def leave(self, why: str) -> None:
        """Leave the world: this process is about to end."""
        self._send({"leave": why})

    # -- state of the members ----------------------------------------------------------------------

    def posts(self, key: str) -> dict[str, Any]:
        """The members' values under this key, by their ids."""
        with self._changed:
            return {it: posts[key] for it, posts in self._posts.items() if key in posts}

    def lost_of(self, view: View) -> list[Member]:
        """Members of this view that are known to be lost, before the next view."""
        with self._changed:
            return [it for it in view.members if it.id in self._lost]

    def ended_of(self, view: View) -> set[str]:
        """Ids of members of this view that are lost, or have left in order."""
        with self._changed:
            return {it for it in view.ids if it in self._lost or it in self._left}

    def is_over(self, view: View) -> bool:
        """Must this view's collectives be broken, because they cannot end any more?

        True if a member is lost, not in the next view, or arrived there or left in order more than
        ARRIVED_S ago; if this process is out; or if it is asked for the lease, for which its main
        thread must be free.
        """
        with self._changed:
            newer = self.view if self.view and self.view.number > view.number else None
            return (
                self._out is not None
                or self._asked is not None
                or any(it.id in self._lost for it in view.members)
                or any(map(self._is_missed, set(view.ids) - set(newer.ids if newer else view.ids)))
                or any(self._has_gone_on(it, view.number) for it in view.ids)
            )

    def _has_gone_on(self, member: str, number: int) -> bool:
        """Has the member arrived at a later view, more than ARRIVED_S ago?"""
        late = time.monotonic() >= self._arrived.get(member, math.inf) + ARRIVED_S
        return late and self._posts.get(member, {}).get(AT, [0])[0] > number

    def _is_missed(self, member: str) -> bool:
        """Does its absence break collectives? At once; if it left in order, after ARRIVED_S."""
        return time.monotonic() >= self._left.get(member, -math.inf) + ARRIVED_S

    def has_news(self, view: View) -> bool:
        """Does a newer view exist, or follow soon?"""
        with self._changed:
            newer = self.view is not None and self.view.number > view.number
            return newer or self.is_over(view)

    def next_view(self, after: int, limit_s: float) -> View | LeaseAsked | Out | None:
        """A view after that number, or a message that comes before it; None after `limit_s`."""

        def found() -> View | LeaseAsked | Out | None:
            newer = self.view if self.view and self.view.number > after else None
            return self._out or newer or self._asked

        return self.wait_for(found, limit_s)

    def wait_for(self, found: Callable[[], T], limit_s: float) -> T:
        """The value of `found()` as soon as it is true, or after `limit_s`."""
        with self._changed:
            return self._changed.wait_for(found, limit_s)

    # -- the thread --------------------------------------------------------------------------------

    def _send(self, message: dict[str, Any]) -> None:
        line = json.dumps(message, separators=(",", ":")).encode() + b"\n"
        # the reading thread notices the loss of the launcher
        with self._sending, contextlib.suppress(OSError):
            self._socket.sendall(line)

    def _read(self) -> None:
        what = "has ended"
        try:
            with self._socket, self._socket.makefile("rb") as lines:
                for line in lines:
                    with self._changed:
                        self._take(json.loads(line))
                        self._changed.notify_all()
                    self.on_news()
        except Exception as error:  # any error: without this thread the process would hang
            what = f"has sent a message that cannot be read: {error!r}"
        print(f"the launcher of this process {visible(what)}", file=sys.stderr, flush=True)
        os._exit(LifeLost.exit_code)

    def _take(self, message: dict[str, Any]) -> None:
        """One message of the launcher, which has one key."""
        ((kind, about),) = message.items()
        if kind == "settings":
            self.least, self.most = about["least"], about["most"]
        elif not self.least:
            pass  # a message for the member that this process was before `rejoin`
        elif kind == "view":
            members = tuple(Member(it["id"], it["pod"]) for it in about["members"])
            gone = tuple(Gone(it["id"], it["pod"], it["how"]) for it in about["gone"])
            self.view = View(about["number"], about["by"], members, gone)
            self._asked = None
            for it in gone:
                self._posts.pop(it.id, None)
                if it.how in IN_ORDER:
                    self._goes_on(self._left, it.id)
        elif kind == "posts":
            for member, posts in about.items():
                if member != self.me:  # the own posts are here already
                    self._posts.setdefault(member, {}).update(posts)
                if AT in posts:
                    self._goes_on(self._arrived, member)
        elif kind == "ended":
            if self.view is None or about not in self.view.ids:  # its posts may still be read
                self._posts.pop(about, None)
        elif kind == "lost":
            self._lost.update(about)
        elif kind == "going":
            self.is_going = bool(about)
        elif kind == "lease":
            self._asked = LeaseAsked(about["number"], about["how"])
        elif kind == "out":
            self._out = Out(about)

    def _goes_on(self, when: dict[str, float], member: str) -> None:
        when[member] = time.monotonic()
        if not self._looks_again:
            self._looks_again = True
            threading.Thread(target=self._look_again, name="arrived", daemon=True).start()

    def _look_again(self) -> None:
        """In a thread: call `on_news` after ARRIVED_S, even if the launcher sends no message."""
        rest_s = ARRIVED_S
        while rest_s > 0:
            time.sleep(rest_s)
            self.on_news()
            with self._changed:
                newest = max([*self._arrived.values(), *self._left.values()], default=0.0)
                rest_s = newest + ARRIVED_S - time.monotonic()
                self._looks_again = rest_s > 0
