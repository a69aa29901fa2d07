"""The mesh: each launcher is connected with all others, and agrees with them who the world is.

It runs in a thread of the launcher, which no call of the worker can block and which dies with its
pod. `views.py` decides; here is what it hears and says:

- TCP. Each launcher dials all others, again and again, and sends its row to them: at each change,
  and a sign of life every BEAT_S. It closes no connection while it lives. So the end of one that
  it has dialed is proof of its death, where its kernel says so; a time limit is none.
- A Unix socket, GPTDDP_MEMBERS of the worker: lines of JSON. Its end is the worker's end.
"""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import struct
import threading
import time
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from gptddp.files import parse_json
from gptddp.launch import frames
from gptddp.launch.frames import BadFrame, Seal
from gptddp.launch.views import Json, Views, ids

TICK_S, BEAT_S = 0.1, 0.5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0  # between two attempts to connect
UNHEARD_S = 3.0  # until a connection whose other end acknowledges nothing is made anew
STOPPED_S = 3.0  # that a worker is stopped, until its launcher says so
ASK_AGAIN_S = 1.0  # after a worker has said that it does not hold the lease
STRANGERS = 64  # connections of which the other side is not known yet, the newest
MOST_ADDRESSES = 4096
_ENDS = (EOFError, OSError, BadFrame, ValueError, KeyError, TypeError, AttributeError)


class _Dialed:
    """The connection to one address."""

    def __init__(self, address: str) -> None:
        self.address, self.agent = address, ""  # of the other side; "": there is no connection
        self.wake = asyncio.Event()  # somebody new is there
        self._seal: Seal | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def connect(self, mesh: "Mesh") -> None:
        """Connect, and stay so as long as it lasts. Raises what is in _ENDS."""
        writer = None
        try:
            async with asyncio.timeout(frames.HANDSHAKE_S):
                reader, writer = await asyncio.open_connection(*frames.split(self.address))
                link: socket.socket = writer.get_extra_info("socket")
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNHEARD_S * 1000))
                greeting = await reader.readexactly(frames.NONCE + frames.AGENT)
                agent, own = greeting[frames.NONCE :].hex(), secrets.token_bytes(frames.NONCE)
                if mesh.has(agent):  # by another name
                    return
                seal = Seal(mesh.key, mesh.run_id, "dial", greeting)
                writer.write(seal.pack(frames.pack({"nonce": own.hex()})))
                answers = Seal(mesh.key, mesh.run_id, "accept", greeting + own)
                await answers.read(reader, frames.SHORT)
                if mesh.has(agent):
                    return
            self.agent, self._seal, self._writer = agent, seal, writer
            mesh.send_all(self)
            await reader.read(1)  # the other side says nothing more
        finally:
            self.agent, self._seal, self._writer = "", None, None
            if writer:
                writer.transport.abort()

    def send(self, payload: bytes) -> None:
        if self._writer and self._seal:
            self._writer.write(self._seal.pack(payload))

    async def end(self) -> None:
        """Close it behind what was sent."""
        if writer := self._writer:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def cut(self) -> None:
        if self._writer:
            self._writer.transport.abort()


class Mesh:
    """One launcher's part. `start` it, and tell it what becomes of its worker."""

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
        """`address`: the host at which the others find this pod; `port`: 0 for any that is free.
        `seeds`: HOST:PORT of others, see `frames.siblings`. `least`, `most`: members of a first
        view. `folder`: for the Unix socket; the user's alone.
        """
        self.key, self.run_id = key, run_id
        self.agent = secrets.token_hex(frames.AGENT)
        self._host, self._port, self._seeds = address, port, seeds
        self._sizes = (least, most)
        self._path = os.path.join(folder, "members")
        self._dials: dict[str, _Dialed] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._heard: dict[str, asyncio.StreamWriter] = {}  # the newest connection of each agent
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._posts: dict[str, Json] = {}  # {"id", "values"} of each agent's worker
        self._row = b""  # as it was sent last
        self._is_due = False
        self._worker: asyncio.StreamWriter | None = None
        self._pid, self._stopped_s, self._status = 0, 0.0, ""
        self._told: Json = {}  # what the worker was told last
        self._trouble: BaseException | None = None

    # -- what the launcher calls, from its own thread ----------------------------------------------

    def start(self) -> str:
        """Begin; the path of the Unix socket. Raises OSError where the port cannot be had."""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mesh", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._trouble:
            raise self._trouble
        return self._path

    def end_of_worker(self, how: str) -> None:
        """The worker has ended so: "its process died of SIGKILL"."""
        self._loop.call_soon_threadsafe(self._end_worker, how)

    def others(self) -> int:
        """How many workers of other launchers are there."""
        rows = [*self.views.rows.values()]
        return sum(row["member"] is not None and row is not self.views.row for row in rows)

    def close(self, why: str) -> None:
        """Leave: the others are told why, and the connections end."""
        with contextlib.suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(self._leave, why)
        self._thread.join(2 * UNHEARD_S)

    # -- the loop ----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:
            self._trouble = error
            if self._ready.is_set():
                raise
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)
        await asyncio.start_unix_server(self._serve_worker, self._path, limit=frames.LONG)
        host: str | None = self._host
        try:
            ip_address(self._host)
        except ValueError:  # a name, which may not resolve to this pod yet: on every address
            host = None
        server = await asyncio.start_server(self._accept, host, self._port, backlog=1024)
        self._address = frames.join(self._host, server.sockets[0].getsockname()[1])
        self.views = Views(self.agent, self._address, *self._sizes)
        self._update()
        for address in self._seeds:
            self._dial(address)
        self._ready.set()
        over = self._loop.create_task(self._over.wait())
        await asyncio.wait({over, self._spawn(self._tick())}, return_when="FIRST_COMPLETED")
        async with asyncio.timeout(UNHEARD_S):
            with contextlib.suppress(TimeoutError):
                await asyncio.gather(*(dialed.end() for dialed in self._dials.values()))

    def _spawn(self, work: Any) -> "asyncio.Task[None]":
        task = self._loop.create_task(work)  # which the loop itself does not keep
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _tick(self) -> None:
        last, beat_s = time.monotonic(), 0.0
        while True:
            await asyncio.sleep(TICK_S)
            now = time.monotonic()
            passed_s, last = min(now - last, 2 * TICK_S), now  # in which this process was running
            self.views.tick(passed_s)
            self._update()
            beat_s += passed_s
            if beat_s >= BEAT_S:
                for dialed in self._dials.values():
                    dialed.send(b"{}")
                self._look_at_worker(beat_s)
                beat_s = 0.0

    def _soon(self) -> None:
        """Something has changed: what comes in at once is looked at together."""
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._update)

    def _update(self) -> None:
        """Draw the conclusions, and tell everybody what is new."""
        self._is_due = False
        self.views.step()
        if self.views.is_expelled:
            self._begin_anew()
        peers = [row["address"] for row in self.views.rows.values()]
        row = frames.pack({"row": self.views.row, "peers": peers})
        if row != self._row:
            self._row = row
            for dialed in self._dials.values():
                dialed.send(row)
        for agent in [*self._posts]:
            of = self.views.rows.get(agent)
            if of is None or of["member"] is None or of["member"]["id"] != self._posts[agent]["id"]:
                del self._posts[agent]
        self._tell_worker()

    def _begin_anew(self) -> None:
        """Somebody has proof, though a false one, that this agent is dead: be another."""
        worker, status = self._worker, self._told.get("view")
        self.agent = secrets.token_hex(frames.AGENT)
        self.views = Views(self.agent, self._address, *self._sizes)
        for dialed in self._dials.values():
            dialed.cut()
        if worker:
            self._push({"out": status["number"] if status else 0})

    def _leave(self, why: str) -> None:
        self.views.attach(None, why)
        self._update()
        self._over.set()

    # -- the other launchers -----------------------------------------------------------------------

    def has(self, agent: str) -> bool:
        """Is this agent connected, or the own one?"""
        return agent == self.agent or any(d.agent == agent for d in self._dials.values())

    def send_all(self, dialed: _Dialed) -> None:
        """What the other side of a new connection has to know."""
        dialed.send(self._row)
        if own := self._posts.get(self.agent):
            dialed.send(frames.pack({"posts": own}))

    def _dial(self, address: str) -> None:
        if address not in self._dials and len(self._dials) < MOST_ADDRESSES:
            dialed = self._dials[address] = _Dialed(address)
            if address != self._address:
                self._spawn(self._keep_connected(dialed))

    async def _keep_connected(self, dialed: _Dialed) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            dialed.wake.clear()
            begin = time.monotonic()
            with contextlib.suppress(*_ENDS):
                await dialed.connect(self)
            if time.monotonic() - begin > 2 * frames.HANDSHAKE_S:
                pause_s = FIRST_PAUSE_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(dialed.wake.wait(), pause_s)
                pause_s = FIRST_PAUSE_S
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of another launcher, or of a stranger, from its begin to its end."""
        self._strangers[writer] = None
        while len(self._strangers) > STRANGERS:  # a launcher needs one round trip only
            oldest = next(iter(self._strangers))
            del self._strangers[oldest]
            oldest.transport.abort()
        agent = ""
        try:
            async with asyncio.timeout(frames.HANDSHAKE_S):
                greeting = secrets.token_bytes(frames.NONCE) + bytes.fromhex(self.agent)
                writer.write(greeting)
                seal = Seal(self.key, self.run_id, "dial", greeting)
                hello = await seal.read(reader, frames.SHORT)
                nonces = greeting + bytes.fromhex(hello["nonce"])
                answers = Seal(self.key, self.run_id, "accept", nonces)
                writer.write(answers.pack(frames.pack({"agent": self.agent})))
                first = await seal.read(reader, frames.LONG)
            agent = first["row"]["agent"]
            self._strangers.pop(writer, None)
            before, self._heard[agent] = self._heard.get(agent), writer
            if before:
                before.transport.abort()
            self._take(agent, first)
            while True:
                self._take(agent, await seal.read(reader, frames.LONG))
        except (EOFError, ConnectionResetError) as error:
            is_eof = isinstance(error, EOFError)
            if self._heard.get(agent) is writer:
                self._disconnected(agent, is_eof)
        except _ENDS:
            pass
        finally:
            self._strangers.pop(writer, None)
            if self._heard.get(agent) is writer:
                del self._heard[agent]
            writer.transport.abort()

    def _disconnected(self, agent: str, is_eof: bool) -> None:
        """The kernel of an agent says that its socket is closed; it may say so late by a reset."""
        if is_eof or self.views.silence(agent) < 2 * BEAT_S:
            self.views.died(agent, "its launcher ended, or its pod")
            self._soon()

    def _take(self, agent: str, said: Json) -> None:
        """A frame of another launcher. Raises what is in _ENDS for one of another version."""
        if row := said.get("row"):
            if agent not in self.views.rows:
                for dialed in self._dials.values():
                    dialed.wake.set()
            self.views.hear(row)
            for address in [row["address"], *said["peers"]]:
                self._dial(address)
            self._soon()
        elif posts := said.get("posts"):
            self._post(agent, posts["id"], posts["values"])
        else:
            self.views.beat(agent)

    def _post(self, agent: str, member: str, values: Json) -> None:
        kept = self._posts.get(agent)
        if kept is None or kept["id"] != member:
            kept = self._posts[agent] = {"id": member, "values": {}}
        kept["values"].update(values)
        self._push({"posts": {member: values}})

    # -- the worker --------------------------------------------------------------------------------

    async def _serve_worker(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        link: socket.socket = writer.get_extra_info("socket")
        pid = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        ends: int | None = None
        try:
            with contextlib.suppress(OSError):  # its children may hold the socket: so its end, too
                ends = os.pidfd_open(pid)
                self._loop.add_reader(ends, reader.feed_eof)
            while line := await reader.readline():
                self._from_worker(writer, pid, parse_json(line.decode()))
        except _ENDS:
            pass
        finally:
            if ends is not None:
                self._loop.remove_reader(ends)
                os.close(ends)
            if self._worker is writer:
                self._end_worker(how_it_ends(pid))
            writer.transport.abort()

    def _from_worker(self, writer: asyncio.StreamWriter, pid: int, said: Any) -> None:
        views, member = self.views, self.views.row["member"]
        if new := said.get("attach"):
            how = "it joins again" if self._worker is writer else "another worker has its place"
            self._worker, self._pid, self._stopped_s, self._told = writer, pid, 0.0, {}
            views.attach({"id": new["id"], "pod": new["pod"], "status": "starting"}, how)
            self._push({"settings": dict(zip(("least", "most"), self._sizes, strict=True))})
            self._push({"posts": {p["id"]: p["values"] for p in self._posts.values()}})
        elif self._worker is not writer or member is None:
            return
        elif "status" in said:
            member["status"] = said["status"]
        elif "post" in said:
            key, value = said["post"]
            self._post(self.agent, member["id"], {key: value})
            self._update()  # the row with this worker goes first
            for dialed in self._dials.values():
                dialed.send(frames.pack({"posts": {"id": member["id"], "values": {key: value}}}))
        elif "broken" in said:
            views.row["broken"] = said["broken"]
        elif "lease" in said:
            views.answer(said["lease"], said["held"])
            if not said["held"]:
                self._loop.call_later(ASK_AGAIN_S, self._told.pop, "lease", None)
        elif "leave" in said:
            views.attach(None, said["leave"])
        self._soon()

    def _end_worker(self, how: str) -> None:
        if self._worker:
            self._worker.transport.abort()
        self._worker, self._pid = None, 0
        self.views.attach(None, how)
        self._soon()

    def _look_at_worker(self, passed_s: float) -> None:
        """Say of a worker that is stopped for STOPPED_S that it is, and when it goes on."""
        member = self.views.row["member"]
        is_stopped = bool(self._pid) and _stat(self._pid)[:1] in (["T"], ["t"])
        self._stopped_s = self._stopped_s + passed_s if is_stopped else 0.0
        if member and is_stopped and self._stopped_s >= STOPPED_S and member["status"] != "stopped":
            self._status, member["status"] = member["status"], "stopped"
        elif member and not is_stopped and member["status"] == "stopped":
            member["status"] = self._status

    def _tell_worker(self) -> None:
        """Push what the worker does not know yet."""
        views = self.views
        if self._worker is None:
            return
        news: Json = {"out": views.out, "lost": [*views.lost], "going": views.is_going}
        news |= {"lease": views.question, "view": views.row["view"] if views.is_in else None}
        for name, value in news.items():
            if value != self._told.get(name):
                shown = self._shown(value) if name == "view" and value else value
                if value or name == "going":
                    self._push({name: shown})
                self._told[name] = value

    def _shown(self, view: Json) -> Json:
        """A view as the worker gets it: gone is who was in the last one that it was told."""
        before = ids(self._told.get("view"))
        members = [{"id": m["id"], "pod": m["pod"]} for m in view["members"]]
        gone = [one for one in view["gone"] if one["id"] in before]
        return {"number": view["number"], "by": view["by"], "members": members, "gone": gone}

    def _push(self, value: Json) -> None:
        if self._worker:
            self._worker.write(frames.pack(value) + b"\n")


def _stat(pid: int) -> list[str]:
    """/proc/PID/stat from the state on; empty where there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def how_it_ends(pid: int) -> str:
    """How a process ends that has just closed its files: the kernel shows it until it is reaped."""
    stat = _stat(pid)
    code = int(stat[49]) if len(stat) > 49 else 0
    if code & 127:
        with contextlib.suppress(ValueError):
            return f"its process died of {signal.Signals(code & 127).name}"
    return f"its process ended with exit code {code >> 8}" if code else "its process ended"
