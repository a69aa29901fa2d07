"""Signed frames between launchers: whoever lacks the job's key can neither read on nor be heard.

A connection carries rows one way, from the side that dials to the side that accepts:

    accepting   16 random bytes (a nonce), and the 8 bytes of its agent's id
    dialing     a frame: its agent, and a nonce of its own
    accepting   a frame: its agent
    dialing     frames, as long as it lives

A frame is 4 bytes of length, an HMAC-SHA256 and JSON. The key of the HMAC is made of the job's key,
the rendezvous id, the direction and the nonces; what it is over begins with the frame's count. So
a frame of another job, connection or place does not verify. Nothing is ever unpickled.
"""

import asyncio
import hmac
import ipaddress
import json
import os
import re
from typing import Any

HANDSHAKE_S = 2.0
SHORT, LONG = 4096, 1 << 20  # bytes of a frame's JSON, before and after the other side is known
NONCE, AGENT = 16, 8  # bytes
_HEAD = 4 + 32


class BadFrame(Exception):
    """What came is not of this job."""


class Seal:
    """Signs the frames of one direction of a connection, or checks them; they are counted."""

    def __init__(self, key: str, rendezvous_id: str, direction: str, nonces: bytes) -> None:
        names = f"{rendezvous_id}\0{direction}\0".encode()  # neither can hold the \0
        self._key, self._count = hmac.digest(os.fsencode(key), names + nonces, "sha256"), 0

    def pack(self, payload: bytes) -> bytes:
        """The next frame to send."""
        return len(payload).to_bytes(4, "big") + self._mac(payload) + payload

    async def read(self, reader: asyncio.StreamReader, most: int) -> dict[str, Any]:
        """The next frame that comes. Raises BadFrame, EOFError, OSError."""
        head = await reader.readexactly(_HEAD)
        size = int.from_bytes(head[:4], "big")
        if size > most:
            raise BadFrame
        payload = await reader.readexactly(size)
        if not hmac.compare_digest(self._mac(payload), head[4:]):
            raise BadFrame
        value: dict[str, Any] = json.loads(payload)
        return value

    def _mac(self, payload: bytes) -> bytes:
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "big") + payload, "sha256")


def pack(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def split(address: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def join(host: str, port: int) -> str:
    """HOST:PORT."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def siblings(endpoint: str, pods: int, workers: int = 1) -> list[str]:
    """The addresses of all launchers of a job, as far as the endpoint's name shows them.

    `NAME-3.rest` is one of NAME-0 to NAME-(pods - 1), as the operator numbers pods, and a loopback
    address the first of as many, as `--local` does. Each worker of a pod has a launcher, at ports
    that follow each other.
    """
    host, port = split(endpoint)
    name, dot, rest = host.partition(".")
    hosts = [host]
    if re.fullmatch(r"127\.\d+\.\d+\.\d+", host):
        first = ipaddress.IPv4Address(host)
        hosts = [str(first + n) for n in range(pods)]
    elif found := re.fullmatch(r"(.+-)\d+", name):
        hosts += [f"{found[1]}{n}{dot}{rest}" for n in range(pods)]
    hosts = [*dict.fromkeys(hosts)]
    return [join(host, port + n) for host in hosts for n in range(workers)]
