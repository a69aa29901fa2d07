"""The mesh: each launcher is connected with all others, and agrees with them on the world.

It runs in a thread of the launcher: no call of the worker can block it, and it dies with its pod.
`views.py` decides. `links.py` sends the *row* of this launcher (*agent*), all that it knows, to all
others: at each change, and every BEAT_S as a sign of life. The mesh informs the worker over a Unix
socket, by lines of JSON; the end of that connection is the worker's end.
"""

import asyncio
import contextlib
import errno
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from gptddp import __version__
from gptddp.distributed.members import AT, IN_ORDER
from gptddp.distributed.process import how_ended, stat
from gptddp.files import parse_json
from gptddp.launch.links import LONG, TROUBLE, Links, Seal, join, pack
from gptddp.launch.rows import Json, ids
from gptddp.launch.views import Views

ENDED = "ended"  # a file: pid and status, as of `wait`, of the last worker that was reaped
TICK_S, BEAT_S = 0.1, 0.5
# of a worker in this state, until its launcher reports it
LIMITS_S = {"stopped": 3.0, "late": 4.0}


class Mesh:
    """One launcher's part. Call `start`, and report the end of its worker."""

    def __init__(
        self,
        key: str,
        run_id: str,
        address: str,
        port: int,
        seeds: Sequence[str],
        least: int,
        most: int,
        folder: Path | str,
    ) -> None:
        """`address`: the host at which the others find this pod; `port`: 0 for any free port.
        `seeds`: HOST:PORT of others, see `pod_facts.seeds`. `least`, `most`: members of a first
        view. `folder`: for the Unix socket; private to the user.
        """
        # a pod of another version is a stranger: its frames may differ
        self._seal = partial(Seal, key, f"{run_id} {__version__}")
        self._host, self._port, self._seeds = address, port, seeds
        self._sizes = (least, most)
        self._path = os.path.join(folder, "members")
        self._posts: dict[str, Json] = {}  # {"id", "values"} of each agent's worker
        self._row = b""  # as last sent
        self._is_due = False
        self.worker_pid = 0
        self._worker: asyncio.StreamWriter | None = None
        self._unfit_s, self._status = 0.0, ""  # how long it is stopped or late; its status before
        self.left_at = -math.inf  # monotonic: when a worker that still lives left the world
        self._told: Json = {}  # last values pushed to the worker
        self._ready = threading.Event()
        self._trouble: Exception | None = None  # that prevented the start

    # -- called by the launcher, from its own thread -----------------------------------------------

    def start(self) -> str:
        """Begin; return the path of the Unix socket. Raises OSError for an unusable address.

        Forks of this process would hold its connections open, and so hide its death.
        """
        self._thread = threading.Thread(target=self._run, name="mesh", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._trouble:
            raise self._trouble
        return self._path

    def end_of_worker(self, how: str) -> None:
        """Report how the worker ended, as "its process died of SIGKILL"."""
        self._loop.call_soon_threadsafe(self._end_worker, how)

    def others(self) -> int:
        """The number of workers of other launchers."""
        return sum(r["member"] is not None for r in [*self.views.rows.values()][1:])

    @property
    def rank(self) -> int | None:
        """The place of the own worker in the last view; None if it is in no view."""
        member, places = self.views.row["member"], ids(self.views.row["view"])
        return places.index(member["id"]) if member and member["id"] in places else None

    @property
    def going(self) -> bool:
        """Is the own worker in the last view, with its state?"""
        member = self.views.row["member"]
        return self.rank is not None and bool(member) and member["status"] == "going"

    @property
    def is_bereaved(self) -> bool:
        """Has another member of the last view ended? The own worker may have left it since."""
        view = self.views.row["view"] or {"members": []}
        others = [m["id"] for m in view["members"] if m["agent"] != self.views.row["agent"]]
        return not set(others).isdisjoint(self.views.lost)

    def close(self, why: str) -> None:
        """Leave: send the reason to the others, and end the connections."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._leave, why)
        self._thread.join(2)

    # -- the loop ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:
            if self._ready.is_set():
                raise
            self._trouble = error
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        calls = (self._seal, self._greet, self._take, self._died)
        self._links = Links(*calls, self._host, self._seeds)
        await asyncio.start_unix_server(self._serve, self._path, limit=LONG)
        host: str | None = self._host
        try:
            ip_address(self._host)
        except ValueError:  # a name that may not resolve to this pod yet: listen on every address
            host = None
        try:
            server = await asyncio.start_server(self._links.accept, host, self._port, backlog=128)
        except OSError as error:  # two pods on one address, or a stranger
            if error.errno != errno.EADDRINUSE:
                raise
            server = await asyncio.start_server(self._links.accept, host, 0, backlog=128)
        self._address = join(self._host, server.sockets[0].getsockname()[1])
        self.views = Views(self._links.agent, self._address, *self._sizes)
        self._update()
        for address in self._seeds:
            self._links.dial(address)
        self._ready.set()
        await self._tick()
        self._links.end()
        # Python 3.11 would print a traceback for each connection cancelled now
        self._loop.set_exception_handler(lambda loop, context: None)

    async def _tick(self) -> None:
        last, beat_s = time.monotonic(), 0.0
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), TICK_S)
            now = time.monotonic()
            passed_s, last = min(now - last, 2 * TICK_S), now  # while this process was running
            self.views.tick(passed_s)
            self._update()
            beat_s += passed_s
            if beat_s >= BEAT_S:
                self._links.send(self._row)
                self._look_at_worker(beat_s)
                beat_s = 0.0

    def _soon(self) -> None:
        """Note a change; changes that arrive together are handled together."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._update)

    def _update(self) -> None:
        """Draw the conclusions, and send the news to all."""
        self._is_due = False
        self.views.step()
        if self.views.is_expelled:  # an agent has a false proof that this agent is dead
            self._links.begin_anew()
            self.views = Views(self._links.agent, self._address, *self._sizes)
            self._push({"out": (self._told.get("view") or {"number": 0})["number"]})
        rows = self.views.rows
        row = pack({"row": self.views.row, "peers": [row["address"] for row in rows.values()]})
        if row != self._row:
            self._row = row
            self._links.send(row)
        for agent, post in [*self._posts.items()]:
            # over an open connection a pod that was silent for long does not send its posts again
            silent = post if self._links.hears(agent) else None
            member = rows[agent]["member"] if agent in rows else silent
            if agent in self.views.row["dead"] or not member or member["id"] != post["id"]:
                del self._posts[agent]
                self._push({"ended": post["id"]})
        self._tell_worker()

    def _leave(self, why: str) -> None:
        self.views.attach(None, why)
        self._over.set()

    # -- the other launchers -----------------------------------------------------------------------

    def _greet(self) -> list[bytes]:
        own = self._posts.get(self._links.agent)
        return [self._row, pack({"posts": own})] if own else [self._row]

    def _take(self, agent: str, said: Json) -> None:
        """A frame of another launcher."""
        if posts := said.get("posts"):
            self._post(agent, posts["id"], posts["values"])
            return
        if said["row"] != self.views.rows.get(agent):
            self._soon()
        if agent in self._posts and agent not in self.views.rows:  # silent until now
            self._push({"posts": {self._posts[agent]["id"]: self._posts[agent]["values"]}})
        self.views.hear(said["row"])
        for address in {said["row"]["address"], *said["peers"]} - {self._address}:
            self._links.dial(address)

    def _died(self, agent: str) -> None:
        self.views.died(agent, "its pod or its launcher has ended")
        self._soon()

    def _post(self, agent: str, member: str, values: Json) -> None:
        if agent not in self._posts or self._posts[agent]["id"] != member:
            self._posts[agent] = {"id": member, "values": {}}
        self._posts[agent]["values"].update(values)
        self._push({"posts": {member: values}})

    # -- the worker --------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link: socket.socket = writer.get_extra_info("socket")
        pid = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        with contextlib.ExitStack() as stack:
            stack.callback(self._disconnected, writer, pid)
            stack.enter_context(contextlib.suppress(*TROUBLE))
            end = os.pidfd_open(pid)
            stack.callback(os.close, end)
            stack.callback(self._loop.remove_reader, end)
            self._loop.add_reader(end, self._has_ended, end, reader)
            while line := await reader.readline():
                self._hear_worker(writer, pid, parse_json(line.decode()))

    def _has_ended(self, end: int, reader: asyncio.StreamReader) -> None:
        """The worker's process has ended; its children may hold the socket open."""
        self._loop.remove_reader(end)
        self._loop.call_later(TICK_S, reader.feed_eof)  # its last lines come first

    def _disconnected(self, writer: asyncio.StreamWriter, pid: int) -> None:
        if self._worker is writer:
            self._end_worker(how_it_ends(pid, Path(self._path).with_name(ENDED)))
        writer.transport.abort()

    def _hear_worker(self, writer: asyncio.StreamWriter, pid: int, said: Any) -> None:
        views, member = self.views, self.views.row["member"]
        if new := said.get("attach"):
            how = "it joins again" if self._worker is writer else "another worker has its place"
            self._worker, self.worker_pid, self._told = writer, pid, {}
            self._unfit_s, self._status = 0.0, ""
            views.attach({"id": new["id"], "pod": new["pod"], "status": "starting"}, how)
            self._push({"settings": dict(zip(("least", "most"), self._sizes, strict=True))})
            posts = [post for agent, post in self._posts.items() if agent in views.rows]
            self._push({"posts": {it["id"]: it["values"] for it in posts}})
        elif self._worker is not writer or member is None:
            return
        elif "status" in said:
            member["status"], self._status = said["status"], ""
        elif "post" in said:
            values = dict([said["post"]])
            self._post(self._links.agent, member["id"], values)
            self._update()  # the row with this worker is sent first
            self._links.send(pack({"posts": {"id": member["id"], "values": values}}))
        elif "broken" in said:
            views.row["broken"] = said["broken"]
        elif "lease" in said:
            views.answer(said["lease"])
        elif "leave" in said:
            views.attach(None, said["leave"])
            self.left_at = time.monotonic()
        self._soon()

    def _end_worker(self, how: str) -> None:
        if self._worker:
            self._worker.transport.abort()
        self._worker, self.worker_pid, self.left_at = None, 0, -math.inf
        self.views.attach(None, how)
        self._soon()

    def _look_at_worker(self, passed_s: float) -> None:
        """Report a worker that is stopped, or that was admitted and does not join."""
        if (member := self.views.row["member"]) is None:
            return
        how = "stopped" if stat(self.worker_pid)[:1] in (["T"], ["t"]) else ""
        if not how and self.views.is_in and (self._status or member["status"]) == "warm":
            at = self._posts.get(self._links.agent, {"values": {}})["values"].get(AT, [0])[0]
            how = "late" if at < self.views.row["view"]["number"] else ""
        self._unfit_s = self._unfit_s + passed_s if how else 0.0
        if how and not self._status and self._unfit_s >= LIMITS_S[how]:
            self._status, member["status"] = member["status"], how
        elif not how and self._status:
            member["status"], self._status = self._status, ""

    def _tell_worker(self) -> None:
        """Push the news that the worker does not know yet."""
        views = self.views
        lost = [it for it, how in views.lost.items() if views.is_in and how not in IN_ORDER]
        news: Json = {"out": views.out, "lost": lost, "going": views.is_going}
        news |= {"lease": views.question, "view": views.row["view"] if views.is_in else None}
        for name, value in news.items() if self._worker else ():
            if value != self._told.get(name):
                if value or name == "going":
                    self._push({name: value})
                self._told[name] = value

    def _push(self, value: Json) -> None:
        if self._worker:
            self._worker.write(pack(value) + b"\n")


def how_it_ends(pid: int, reaped: Path) -> str:
    """The end of a process that has just closed its files, from the kernel until it is reaped.

    Before it reaps the process, the forkserver writes the status to the file `reaped`.
    """
    status = int((stat(pid) or ["0"])[-1])  # as `wait` gives it
    with contextlib.suppress(OSError, ValueError):  # no file, or not whole
        of, last = map(int, reaped.read_text().split())
        status = last if of == pid else status
    return how_ended(os.waitstatus_to_exitcode(status))
