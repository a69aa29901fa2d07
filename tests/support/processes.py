"""Processes of this machine, as /proc has them, and processes that end with a test."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gptddp.launch.siblings import free_ports


def ending(make: Callable[..., Any], end: Callable[[Any], Any]) -> Iterator[Callable[..., Any]]:
    """For a fixture: a function that makes one more object; all are ended after the test."""
    made: list[Any] = []

    def begin(*args: Any, **options: Any) -> Any:
        made.append(make(*args, **options))
        return made[-1]

    yield begin
    for it in made:
        end(it)


def kill(process: Any) -> None:
    process.kill()
    process.communicate()


def free_port() -> int:
    """A port of this machine that was free a moment ago, and that no outgoing connection takes."""
    return free_ports(1)


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
