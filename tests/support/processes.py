"""Processes of this machine, as /proc has them."""

from pathlib import Path


def alive(pid: int) -> bool:
    """Is the process there, and no zombie?"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children(pid: int) -> list[int]:
    return [int(it) for it in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def workers(launcher: int) -> list[int]:
    """The training processes of a pod: the children of its launcher's warm server."""
    return [it for child in children(launcher) for it in children(child)]
