"""What a run has, for who does not decide: the launcher, and the rescue of a snapshot.

As for the trainer, what is given counts before what the ledger has, and that before config.json: a
life that is killed at its beginning may have left its change in the ledger alone.
"""

import contextlib
from pathlib import Path

from gptddp.config import Config, continued, differences, of_run
from gptddp.errors import ConfigError
from gptddp.files import read_json
from gptddp.flags import from_saved
from gptddp.run import summary
from gptddp.run.directory import FINISHED, LEDGER, as_recorded, config_of, id_of
from gptddp.run.history import has_checkpoints, has_older_config


def config_in_force(config: Config) -> Config:
    """The configuration with what is not given as the run has it, where there is one.

    Nothing is refused, and a run that cannot be used is none. Raises OSError for trouble that may
    pass.
    """
    return continued(config, run) if (run := _run(config)) else config


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
        now, step, had_s = continued(config, run), marker["step"], marker.get("max_time", 0.0)
        limit_s = had_s if now.max_time is None else now.max_time
        steps = int(marker["steps"]) if now.steps is None else now.steps
        if step >= steps:
            return why_ended(step, steps)
        if step < int(marker["steps"]) and 0 < limit_s <= had_s:
            return why_ended(step, steps, limit_s)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        pass  # torn or foreign: the trainer will see
    return ""


def why_ended(step: int, steps: int, max_time: float = 0.0) -> str:
    """Why a run that has done `step` of `steps` has ended, and what goes on; `max_time`: by that.

    A smaller `steps` than the run has done is no way back: no step is undone.
    """
    if max_time:
        return f"max_time of {max_time:g} s is used up: a larger --max-time goes on"
    if steps < step:
        return (
            f"steps is {steps}, but {step} steps are done, and none is undone: the run is "
            f"finished; --steps above {step} goes on"
        )
    return f"all {steps} steps are done: a larger --steps goes on"
