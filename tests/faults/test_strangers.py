"""A neighbour who reaches every port of the job and has no key."""

import contextlib
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gptddp.k8s.local import reaper

HELD = 100  # connections at a port, and so many that are never closed


@pytest.fixture(scope="module")
def job(jobs):
    it = jobs()
    it.steady()
    return it


def ports(job) -> set[tuple[str, int]]:
    """Where the processes of the pods listen: launchers, and gloo in the workers."""
    inodes = set()
    for pid in reaper.members(job.tag):
        with contextlib.suppress(OSError):
            for fd in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(os.readlink(fd).removeprefix("socket:[").removesuffix("]"))
    found = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, address, _, state, *rest = line.split()
        if state == "0A" and rest[5] in inodes:
            host, port = address.split(":")
            found.add((socket.inet_ntoa(struct.pack("<I", int(host, 16))), int(port, 16)))
    return found


def bother(where: tuple[str, int], held: list[socket.socket]) -> None:
    """Say nothing, say nonsense, promise much, or answer a greeting with another key."""
    with contextlib.suppress(OSError):
        it = socket.create_connection(where, 1)
        held.append(it)
        words = random.choice([b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(200), b"\xff" * 8])
        it.settimeout(0.1)
        with contextlib.suppress(TimeoutError):
            it.recv(16)  # the nonce
        it.sendall(words)
        body = b'{"agent": "a stranger", "view": {"number": 1000000, "members": []}}'
        it.sendall(struct.pack(">I", 32 + len(body)) + os.urandom(32) + body)


@contextlib.contextmanager
def stranger(job) -> Iterator[None]:
    """Bothers all ports all the time."""
    over, held = threading.Event(), list[socket.socket]()

    def at_work() -> None:
        while not over.is_set():
            for where in ports(job):
                bother(where, held)
            while len(held) > HELD * 8:
                held.pop(0).close()
            time.sleep(0.1)  # the processor is the others'

    threads = [threading.Thread(target=at_work) for _ in range(4)]
    for it in threads:
        it.start()
    try:
        yield
    finally:
        over.set()
        for it in threads:
            it.join()
        for connection in held:
            connection.close()


@pytest.mark.fault(39)
def test_a_stranger_neither_joins_nor_holds_up_a_recovery(job, jobs, strike):
    """A worker, then a pod is killed while he is at all ports; a pod with another key is no
    member."""
    another = jobs(size=5, network=job.network, key="another key" * 4)
    another.hold(0, 1, 2, 3)
    with stranger(job):
        happens = "retry"
        with strike(job, "a worker killed, a stranger connects to all ports", happens, 3):
            job.shoot(3)
        another.tick()
        with strike(job, "a pod killed, a stranger connects to all ports", happens, 1):
            job.kill(1)
            another.tick()
    assert another.pid(4)
    job.wait(3)
    assert max(line["world_size"] for line in job.lines()) == 4


def test_the_run_is_the_undisturbed_one(job, ends_undisturbed):
    """After all of the above."""
    ends_undisturbed(job)
