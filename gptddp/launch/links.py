"""Links between launchers: signed frames over TCP, each connection in one direction.

    accepting   16 random bytes (a nonce), and 8 bytes: the id of this launcher (*agent*)
    dialing     a frame: its nonce, and the address at which it sees the accepting side
    accepting   a frame: is that address its own? Then the connection is straight
    dialing     frames, as long as it lives

A frame is 4 bytes of length, an HMAC-SHA256 and JSON. The key of the HMAC is made of the job's key,
the rendezvous id, the direction and the nonces; its message begins with the frame's count. So a
frame of another job, connection or place does not verify. Nothing is ever unpickled.

Each side dials the other, again and again, and closes no connection while it lives. The dialing
side receives nothing more, so its kernel always ends its connections with FIN when it dies: a FIN
is proof of its death. A reset, which a stranger can forge, or a time limit is no proof.

A stranger at a pod's former address can relay the frames of two others, and end both connections.
So the end of a connection that is not straight is no proof, and a straight one replaces it.
"""

import asyncio
import contextlib
import hmac
import json
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

Json = dict[str, Any]

HANDSHAKE_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 2.0  # between two attempts to connect
UNHEARD_S = 3.0  # until a connection without acknowledgements is replaced
FORGOTTEN_S = 600.0  # of failures, until an address that is not a seed is given up
STRANGERS = 64  # newest connections whose other side is not known yet
SHORT, LONG = 4096, 1 << 20  # bytes of a frame's JSON, before and after the other side is known
NONCE, AGENT = 16, 8  # bytes
TROUBLE = (  # for any input
    *(EOFError, OSError, ValueError, KeyError, TypeError, AttributeError),
    *(OverflowError, RecursionError),  # a port, nested JSON
)


def pack(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


class Seal:
    """Signs or checks the frames of one direction of a connection, and counts them."""

    def __init__(self, key: str, rendezvous_id: str, direction: str, nonces: bytes) -> None:
        names = f"{rendezvous_id}\0{direction}\0".encode()  # neither can hold the \0
        self._key, self._count = hmac.digest(os.fsencode(key), names + nonces, "sha256"), 0

    def pack(self, payload: bytes) -> bytes:
        """The next frame to send."""
        return len(payload).to_bytes(4, "big") + self._mac(payload) + payload

    async def read(self, reader: asyncio.StreamReader, most: int) -> Json:
        """Receive the next frame. Raises EOFError, OSError, and ValueError for a forged frame."""
        size = int.from_bytes(await reader.readexactly(4), "big")
        mac = await reader.readexactly(32)
        payload = await reader.readexactly(size if size <= most else 0)
        if not hmac.compare_digest(self._mac(payload), mac):
            raise ValueError("not of this job")
        value: Json = json.loads(payload)
        return value

    def _mac(self, payload: bytes) -> bytes:
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "big") + payload, "sha256")


class Links:
    """All connections of one agent, in the running loop.

    A new connection is sent `greet()`. `take(agent, frame)` is called for each received frame, and
    `died(agent)` at the proof of an agent's death.
    """

    def __init__(
        self,
        seal: Callable[[str, bytes], Seal],
        greet: Callable[[], list[bytes]],
        take: Callable[[str, Json], None],
        died: Callable[[str], None],
        host: str,
        seeds: Sequence[str],
    ) -> None:
        """`seal(direction, nonces)`: with the job's key and id. `host`: of this launcher."""
        self.agent = secrets.token_hex(AGENT)
        self._seal, self._greet, self._take, self._died = seal, greet, take, died
        self._seeds = seeds
        self._source = (host, 0) if host.startswith("127.") else None  # of this pod
        self._dials: dict[str, asyncio.Task[None]] = {}  # by address
        self._reached: dict[str, str] = {}  # by address: its IP when it was last reached
        # by agent; bool: the connection is straight
        self._outward: dict[str, tuple[asyncio.StreamWriter, Seal, bool]] = {}
        self._inward: dict[str, tuple[asyncio.StreamWriter, bool]] = {}
        self._strangers: dict[asyncio.StreamWriter, None] = {}
        self._somebody = asyncio.Event()  # an agent is new: maybe at an address that failed

    def send(self, payload: bytes) -> None:
        """Send to all connected agents."""
        for writer, seal, _ in self._outward.values():
            writer.write(seal.pack(payload))

    def hears(self, agent: str) -> bool:
        """Is a connection from this agent open?"""
        return agent in self._inward

    def dial(self, address: str) -> None:
        """Keep a connection to this address from now on."""
        if address not in self._dials:
            self._dials[address] = asyncio.create_task(self._keep_connected(address))

    def begin_anew(self) -> None:
        """Become a new agent; the others connect to it again."""
        writers = [writer for writer, *_ in self._outward.values()]
        writers += [writer for writer, _ in self._inward.values()]
        self.agent = secrets.token_hex(AGENT)
        self._inward.clear()  # the ends of these connections are no proof
        for writer in writers:
            writer.transport.abort()

    def end(self) -> None:
        """Close all connections, after all sent frames."""
        for writer, *_ in self._outward.values():
            writer.close()

    async def _keep_connected(self, address: str) -> None:
        pause_s, begin, last = FIRST_PAUSE_S, 0.0, time.monotonic()
        while address in self._seeds or begin < last + FORGOTTEN_S:
            begin = time.monotonic()
            with contextlib.suppress(*TROUBLE):
                await self._connect(address)
            if is_new := time.monotonic() - begin > 2 * HANDSHAKE_S:
                last = time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._somebody.wait(), FIRST_PAUSE_S if is_new else pause_s)
                is_new = True
            pause_s = FIRST_PAUSE_S if is_new else min(2 * pause_s, LONGEST_PAUSE_S)
        del self._dials[address]  # another agent may name it again

    async def _connect(self, address: str) -> None:
        """Connect, and wait for the end of the connection. Raises an error of TROUBLE."""
        writer, agent = None, ""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                host, port = split(address)
                try:
                    reader, writer = await asyncio.open_connection(
                        host, port, local_addr=self._source
                    )
                except socket.gaierror:  # a pod whose node was silent for some time has no name
                    host = self._reached[address]
                    reader, writer = await asyncio.open_connection(host, port)
                link: socket.socket = writer.get_extra_info("socket")
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNHEARD_S * 1000))
                greeting, own = await reader.readexactly(NONCE + AGENT), secrets.token_bytes(NONCE)
                name = greeting[NONCE:].hex()
                if name == self.agent or self._is_straight(name):  # by another address of it
                    return
                seal, to = self._seal("dial", greeting), link.getpeername()[:2]
                writer.write(seal.pack(pack({"nonce": own.hex(), "to": to})))
                said = await self._seal("accept", greeting + own).read(reader, SHORT)
            if name not in self._outward or (said["straight"] and not self._is_straight(name)):
                if name in self._outward:
                    self._outward[name][0].transport.abort()
                agent, self._outward[name] = name, (writer, seal, said["straight"])
                self._reached[address] = link.getpeername()[0]
                for payload in self._greet():
                    writer.write(seal.pack(payload))
                await reader.read(1)  # the other side sends nothing more
        finally:
            if agent in self._outward and self._outward[agent][0] is writer:
                del self._outward[agent]
            if writer:
                writer.transport.abort()

    def _is_straight(self, agent: str) -> bool:
        return agent in self._outward and self._outward[agent][2]

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle a connection of another launcher, or of a stranger, until its end."""
        self._strangers[writer] = None
        if len(self._strangers) > STRANGERS:  # drop the oldest of the host with most connections
            hosts = {one: (one.get_extra_info("peername") or "?")[0] for one in self._strangers}
            (most, _), *_ = Counter(hosts.values()).most_common(1)
            oldest = next(one for one, host in hosts.items() if host == most)
            oldest.transport.abort()
            del self._strangers[oldest]
        agent = ""
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                greeting = secrets.token_bytes(NONCE) + bytes.fromhex(self.agent)
                writer.write(greeting)
                seal = self._seal("dial", greeting)
                said = await seal.read(reader, SHORT)
                nonce = bytes.fromhex(said["nonce"])
                is_straight = said["to"] == [*writer.get_extra_info("sockname")[:2]]
                answer = pack({"straight": is_straight})
                writer.write(self._seal("accept", greeting + nonce).pack(answer))
                said = await seal.read(reader, LONG)
            agent = said["row"]["agent"]
            self._strangers.pop(writer, None)
            if agent in self._inward:
                older, was_straight = self._inward[agent]
                if was_straight and not is_straight:
                    return
                older.transport.abort()
            else:
                self._somebody.set()
                self._somebody.clear()
            self._inward[agent] = (writer, is_straight)
            # keepalive finds the silent end of a machine some day, and closes the socket
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            while self._inward[agent][0] is writer:
                self._take(agent, said)
                said = await seal.read(reader, LONG)
        except TROUBLE as error:
            if agent in self._inward and self._inward[agent][0] is writer:
                del self._inward[agent]
                if is_straight and isinstance(error, EOFError):
                    self._died(agent)
        finally:
            self._strangers.pop(writer, None)
            writer.transport.abort()


def split(address: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join(host: str, port: int) -> str:
    """HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
