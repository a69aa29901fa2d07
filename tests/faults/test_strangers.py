"""A stranger: a client that reaches every port of the job, but lacks its key."""

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

HELD = 100  # connections that stay open at each port


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
    """Send nothing, nonsense or the length of a huge message; then one with a wrong signature."""
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
    """Threads that bother all ports all the time."""
    over, held = threading.Event(), list[socket.socket]()

    def at_work() -> None:
        while not over.is_set():
            for where in ports(job):
                bother(where, held)
            while len(held) > HELD * 8:
                held.pop(0).close()
            time.sleep(0.1)  # leave the processor to the job

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
def test_a_client_without_the_key_neither_joins_nor_delays_a_recovery(job, jobs, strike):
    """A worker, and then a pod, is killed while the client connects to all ports. A pod with
    another key does not become a member."""
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


def test_the_run_equals_an_undisturbed_run(job, ends_undisturbed):
    """After all these faults, the run has the bits of an undisturbed one."""
    ends_undisturbed(job)
