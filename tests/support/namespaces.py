"""Pods in network namespaces of their own, on a bridge. A test disconnects and reconnects them."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

NAME = f"gf{os.getpid()}"  # of the bridge's namespace; NAME-0 and so on are the pods'
PREFIX = f"10.{100 + os.getpid() % 100}.1"


def sh(command: str) -> None:
    subprocess.run(command, shell=True, check=True, capture_output=True)


def inside(i: int, command: str) -> None:
    """Run a command as root in the namespace of a pod."""
    sh(f"nsenter --net=/run/netns/{NAME}-{i} {command}")


@contextlib.contextmanager
def bridge(pods: int) -> Iterator[None]:
    """`pods` namespaces, with the addresses PREFIX.100 and so on; all are removed at the end."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("iptables"):
        assert not os.environ.get("GPTDDP_CI")
        pytest.skip("needs root, ip and iptables")
    made = []
    try:
        # the bridge is in a namespace too, as a firewall of this one might filter its traffic
        sh(f"ip netns add {NAME} && ip -n {NAME} link add bridge type bridge")
        sh(f"ip -n {NAME} link set bridge up")
        for i in range(pods):
            sh(f"ip netns add {NAME}-{i}")
            made.append(i)
            sh(f"ip -n {NAME} link add pod{i} type veth peer name eth0 netns {NAME}-{i}")
            sh(f"ip -n {NAME} link set pod{i} master bridge up")
            for it in (
                f"addr add {PREFIX}.{100 + i}/24 dev eth0",
                "link set eth0 up",
                "link set lo up",
            ):
                sh(f"ip -n {NAME}-{i} {it}")
        yield
    finally:
        for i in made:
            sh(f"ip netns del {NAME}-{i}")
        sh(f"ip netns del {NAME}")


def enter(i: int, hosts: Path, host: str = "") -> list[str]:
    """The prefix of a command that runs in that namespace, with that file as /etc/hosts.

    `host`: another host name, with which it cannot see whether processes elsewhere are alive.
    """
    rename = f"hostname {host} && " if host else ""
    bind = f'{rename}mount --bind {hosts} /etc/hosts && exec "$@"'
    space = ["nsenter", f"--net=/run/netns/{NAME}-{i}", "unshare", "--mount"]
    return [*space, *(["--uts"] if host else []), "sh", "-c", bind, "sh"]
