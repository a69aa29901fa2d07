"""The worlds of a rank without processes, for tests of its decisions."""

from types import SimpleNamespace
from typing import Any

from gptddp.training.worlds import Worlds


def worlds_of(size: int, asked: bool = False, waited_s: float = 0.0, static: bool = False) -> Any:
    """The worlds of rank 1, its life, and a list of the reasons for which it has left."""
    left: list[str] = []
    members = None if static else SimpleNamespace(leave=left.append, least=1, most=4)
    world = SimpleNamespace(
        world_size=size, is_static=static, members=members, view=None, pods=(), rank=1
    )
    stop = SimpleNamespace(asked=asked, waited_s=waited_s, cause="stopped by SIGTERM")
    life = SimpleNamespace(world=world, stop=stop, recorder=None, cause="", step=3)
    return Worlds(life, None), life, left
