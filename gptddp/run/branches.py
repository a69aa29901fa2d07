"""Going back: with `--from-step N` a run goes on from a kept checkpoint, as a branch.

The ledger has the branch (event `branch`) before anything is done. What older lives have done
beyond its checkpoint is no part of the run any more, until it is done again.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from gptddp.config import KEPT, Config
from gptddp.distributed import environment
from gptddp.flags import changed, of_run, to_saved

Branch = Mapping[str, Any]  # generation; step, life and name of the checkpoint; config and code


def is_on(branches: Sequence[Branch], generation: int, step: int) -> bool:
    """Is a step that a life has done a part of the run, which has these branches, oldest first?"""
    life: float = math.inf  # of the checkpoint that the branch looked at before begins with
    for branch in reversed(branches):
        if branch["generation"] > life:  # that one has left it
            if generation >= branch["generation"]:
                return False
            continue
        if generation >= branch["generation"]:
            return True
        if step > branch["step"]:
            return False
        life = branch["life"]
    return True


def asks_for_another(given: Config, branches: Sequence[Branch]) -> bool:
    """Does --from-step say that the run is to go back now?

    Not where its newest branch has begun at that step, with what is given and the same code: so
    pods that start again with their flags, and a command that is given again, go on with the
    branch, whatever it has been given since.
    """
    if not given.from_step or not branches:
        return given.from_step > 0
    newest = branches[-1]
    return (
        newest["step"] != given.from_step
        or newest["code"] != environment.code()
        or bool(changed(newest["config"], of_run(given), KEPT))
    )


def about(config: Config) -> dict[str, Any]:
    """What decides the steps of a branch, beside its checkpoint."""
    return {"config": to_saved(config), "code": environment.code()}


def find(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The branches among events of the ledger; a foreign one is left out."""
    found = []
    for event in (it for it in events if it["event"] == "branch"):
        with suppress(LookupError, ValueError):
            found.append(checked(event))
    return found


def checked(event: Mapping[str, Any]) -> dict[str, Any]:
    """The branch of an event of the ledger. Raises LookupError, ValueError for what is none."""
    fields = ("generation", "step", "life", "name", "config", "code")
    branch = {name: event[name] for name in fields}
    if not all(type(branch[name]) is int for name in ("generation", "step", "life")):
        raise ValueError("step and life must be whole numbers")
    if not isinstance(branch["config"], dict):
        raise ValueError("config must be a configuration")
    return branch
