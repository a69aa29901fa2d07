"""Go back: with `--from-step N` a run continues from a kept checkpoint, as a branch.

The ledger has the branch (event `branch`) before anything else is done. The steps of older lives
beyond its checkpoint no longer belong to the run, until they are done again.
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
    """Does a step of a life belong to the run? `branches`: those of the run, oldest first."""
    life: float = math.inf  # of the checkpoint that the newer branch starts from
    for branch in reversed(branches):
        if branch["generation"] > life:  # the newer branch discarded it
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
    """Does --from-step ask the run to go back now?

    No if the newest branch began at that step with the given values and the same code. So pods that
    restart with their flags, and a repeated command, continue the branch, even if its
    configuration was changed since.
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
    """Configuration and code, which decide the steps of a branch together with its checkpoint."""
    return {"config": to_saved(config), "code": environment.code()}


def find(events: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The branches among events of the ledger, without invalid ones."""
    found = []
    for event in (it for it in events if it["event"] == "branch"):
        with suppress(LookupError, ValueError):
            found.append(checked(event))
    return found


def checked(event: Mapping[str, Any]) -> dict[str, Any]:
    """The branch of an event of the ledger. Raises LookupError, ValueError if it is invalid."""
    fields = ("generation", "step", "life", "name", "config", "code")
    branch = {name: event[name] for name in fields}
    if not all(type(branch[name]) is int for name in ("generation", "step", "life")):
        raise ValueError("generation, step and life must be whole numbers")
    if not isinstance(branch["config"], dict):
        raise ValueError("config must be a configuration")
    return branch
