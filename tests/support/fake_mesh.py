"""The launchers' side of the workers' Unix socket, which does what a test says."""

import contextlib
import json
import socket
import threading
from pathlib import Path
from typing import Any


class FakeMesh:
    """One socket for all workers; the test decides on views, losses and so on.

    A worker's posts go to all. If `follows` is true, a member whose connection ends is reported as
    lost to the others at once, as its launcher would; the test makes the views.
    """

    def __init__(self, folder: Path, least: int = 1, most: int = 8) -> None:
        self.path = folder / "members.sock"
        self.settings = {"least": least, "most": most}
        self.members: dict[str, socket.socket] = {}  # by id
        self.pods: dict[str, str] = {}
        self.heard: dict[str, list[dict[str, Any]]] = {}  # the messages of each, except posts
        self.posts: dict[str, dict[str, Any]] = {}
        self.view: dict[str, Any] | None = None
        self.follows = True
        self.changed = threading.Condition(threading.RLock())
        self._server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._server.bind(str(self.path))
        self._server.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for it in (self._server, *self.members.values()):
            with contextlib.suppress(OSError):
                it.shutdown(socket.SHUT_RDWR)  # its thread closes it

    def wait(self, found: Any, limit_s: float = 30.0, why: Any = str) -> Any:
        """The value of `found()` as soon as it is true; an AssertionError after `limit_s`."""
        with self.changed:
            value = self.changed.wait_for(found, limit_s)
        assert value, f"nothing within {limit_s:g} s\n{why()}"
        return value

    def by_pod(self, *pods: str) -> list[str]:
        """The newest member of each of these pods, as soon as all have sent a status."""

        def found() -> list[str]:
            newest = {self.pods[it]: it for it in self.members if self.heard[it]}
            return [newest[pod] for pod in pods] if set(pods) <= set(newest) else []

        return self.wait(found)

    def commit(self, ids: list[str], by: str = "quorum", how: str = "its process died") -> int:
        """Make a view of these members, by rank, and send it to each of them."""
        with self.changed:
            before = self.view["members"] if self.view else []
            gone = [{**it, "how": how} for it in before if it["id"] not in ids]
            members = [{"id": it, "pod": self.pods[it]} for it in ids]
            number = self.view["number"] + 1 if self.view else 1
            self.view = {"number": number, "by": by, "members": members, "gone": gone}
            for it in ids:
                self.tell(it, {"view": self.view})
            return number

    def tell(self, member: str, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, KeyError):
            self.members[member].sendall(json.dumps(message).encode() + b"\n")

    def tell_all(self, message: dict[str, Any]) -> None:
        with self.changed:
            for it in list(self.members):
                self.tell(it, message)

    def _accept(self) -> None:
        with self._server, contextlib.suppress(OSError):
            while True:
                worker, _ = self._server.accept()
                threading.Thread(target=self._read, args=(worker,), daemon=True).start()

    def _read(self, worker: socket.socket) -> None:
        me = ""
        with worker, contextlib.suppress(OSError), worker.makefile("rb") as lines:
            for line in lines:
                with self.changed:
                    me = self._take(me, worker, json.loads(line))
                    self.changed.notify_all()
        with self.changed:
            if self.members.pop(me, None) and self.follows:
                self.posts.pop(me, None)
                self.tell_all({"lost": [me]})
            self.changed.notify_all()

    def _take(self, me: str, worker: socket.socket, message: dict[str, Any]) -> str:
        if about := message.get("attach"):
            self.members.pop(me, None)
            self.posts.pop(me, None)
            me = about["id"]
            self.members[me], self.pods[me], self.heard[me] = worker, about["pod"], []
            self.tell(me, {"settings": self.settings})
            self.tell(me, {"posts": self.posts})
            self.tell(me, {"going": self.view is not None})
        elif about := message.get("post"):
            self.posts.setdefault(me, {})[about[0]] = about[1]
            self.tell_all({"posts": {me: {about[0]: about[1]}}})
        else:
            self.heard[me].append(message)
        return me
