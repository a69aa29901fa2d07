"""What a run has, for who does not decide: the launcher, and the rescue of a snapshot.

As for the trainer, what is given counts before what the ledger has, and that before config.json: a
life that is killed at its beginning may have left its change in the ledger alone.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptddp.budget import BUDGETS, used_up
from gptddp.config import Config
from gptddp.errors import ConfigError
from gptddp.files import read_json
from gptddp.flags import continued, differences, from_saved, of_run
from gptddp.run import summary
from gptddp.run.branches import asks_for_another
from gptddp.run.directory import FINISHED, LEDGER, as_recorded, config_of, id_of
from gptddp.run.history import has_checkpoints, has_older_config


def config_in_force(config: Config) -> Config:
    """The configuration with what is not given as the run has it, where there is one.

    Nothing is refused: the trainer does so, with the difference. A run that cannot be used is none.
    Raises OSError for trouble that may pass.
    """
    with contextlib.suppress(ConfigError):  # what is given and the run do not go together
        return continued(config, run) if (run := _run(config)) else config
    return config


def _run(config: Config) -> Config | None:
    path, saved = Path(config.run_dir), None
    with contextlib.suppress(ConfigError):
        saved = config_of(path)
    with contextlib.suppress(ConfigError):
        ledger = summary.read(path)
        if saved and has_older_config(path, ledger):
            return saved
        if recorded := ledger.config:
            return as_recorded(path, saved, recorded) if saved else from_saved(LEDGER, recorded)
    return saved


def is_finished(config: Config) -> bool:
    """Is the run complete, as its marker says, and is nothing more asked for? False without a run.

    A run of another configuration is not this one: the trainer will refuse it, with the difference.
    """
    return why_finished(config) != ""


def why_finished(config: Config) -> str:
    """Why nothing is left to do, and what goes on, as `why_ended` says it; "" where there is."""
    try:
        path = Path(config.run_dir) if config.run_dir else None
        if path is None or (marker := read_json(path / FINISHED)) is None:
            return ""
        run = _run(config) or Config()
        if differences(of_run(run), of_run(config)):
            return ""
        if marker.get("run_id") not in (None, id_of(path)):  # version 0.1.0 has none
            return ""
        if config.from_scratch and not has_checkpoints(path):  # the trainer begins it anew
            return ""
        asked = continued(config, run)
        if asks_for_another(asked, summary.read(path).branches):
            return ""
        had = {"max_tokens": 0, "max_time": 0.0} | marker  # version 0.1.0 has no max_tokens
        open_ = {name: had[name] for name in BUDGETS if getattr(asked, name) is None}
        asked = dataclasses.replace(asked, **open_)
        if cause := used_up(asked, *_done(had)):
            return why_ended(asked, cause, had["step"])
    except (ConfigError, OSError, ValueError, LookupError, TypeError, AttributeError):
        pass  # torn or foreign: the trainer will see
    return ""


def _done(marker: Mapping[str, Any]) -> tuple[int, int, float]:
    """Steps, targets and seconds of a finished run.

    Version 0.1.0 has noted the steps alone: what ended before them has used up its time.
    """
    by_time = marker["step"] < marker["steps"]
    train_s = marker.get("train_s", marker["max_time"] if by_time else 0.0)
    return marker["step"], marker.get("tokens", 0), train_s


def why_ended(c: Config, cause: str, step: int) -> str:
    """Why a run has ended after `step` steps, which is a budget (`cause`), and what goes on.

    A smaller budget than the run has used is no way back: no step is undone.
    """
    if cause == "max_time":
        return f"max_time of {c.max_time:g} s is used up: a larger --max-time goes on"
    if cause == "max_tokens":
        return f"max_tokens of {c.max_tokens} is used up: a larger --max-tokens goes on"
    if c.steps < step:
        return (
            f"steps is {c.steps}, but {step} steps are done, and none is undone: the run is "
            f"finished; --steps above {step} goes on"
        )
    return f"all {c.steps} steps are done: a larger --steps goes on"
