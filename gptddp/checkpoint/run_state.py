"""What a run has recorded of itself, in its ledger; where that is lost, in a checkpoint.

Who needs the run's id or its configuration, or asks whether it is finished, calls `read` here. Who
goes by the events alone (saves, log) calls `summary.read`.

Where the ledger is lost, or has lost the start of a life that has saved, the newest checkpoint says
the run's id and the configuration that was in force, and the end of an older life that the ledger
still has is not that of the run. Lost with the ledger: the branches, the hash of the data, the row
groups that were left out after that checkpoint, the names of the commits, and the sums (the
rank-seconds, when the run began, whose ranks have differed, who was given --from-scratch). No state
is taken from `config.json` and `finished.json`.
"""

import errno
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptddp.budget import used_up
from gptddp.checkpoint import store
from gptddp.config import KEPT, Config
from gptddp.errors import ConfigError, Unusable
from gptddp.flags import changed, continued, differences, from_saved, of_run
from gptddp.run import summary
from gptddp.run.branches import asks_for_another
from gptddp.run.directory import CHECKPOINTS, LEDGER, is_run
from gptddp.run.history import newest_lost_life
from gptddp.run.summary import Summary


def read(run_dir: str | Path) -> Summary:
    """The state of a run; an empty one where nothing of a run is there. Raises OSError."""
    found, root = summary.read(run_dir), Path(run_dir) / CHECKPOINTS
    for name in filter(store.is_candidate, store.names(run_dir)):
        if store.order(name)[0] <= found.life:
            break  # the ledger has the start of all that is older
        try:
            manifest: Any = store.unsealed(root / name)
        except Unusable as unusable:
            if unusable.transient:
                raise OSError(errno.EIO, str(unusable), str(root)) from unusable
            continue
        run_id, config = manifest.get("run_id"), manifest.get("config")
        if found.run_id in (None, run_id) and isinstance(config, dict):
            found.run_id, found.config, found.finished = run_id, config, None
            break
    if newest_lost_life(run_dir, found):
        found.finished = None
    return found


def configuration(run_dir: str | Path) -> Config:
    """The configuration in force. Raises ConfigError where none is recorded, OSError."""
    run = Path(run_dir)
    found = read(run)
    if found.config is not None:
        return from_saved(run / LEDGER, found.config)
    if not is_run(run):
        raise ConfigError(f"{run} is not a run directory: it has no {LEDGER} and no checkpoint")
    raise ConfigError(
        f"{run}: no {LEDGER} and no checkpoint says the configuration of the run: put one of them "
        "back from a backup"
    )


# -- is it finished? -----------------------------------------------------------------------------


def no_step_left(config: Config, run: Config, ledger: Summary) -> str:
    """Why a start with `config` has no step to do, as `why_ended` says it; "" where it has.

    `run`: the configuration in force. A start that fixes another value than the run has is the
    trainer's to refuse, with the difference. Raises ConfigError for other settings that no step
    would use, OSError.
    """
    done = ledger.finished
    if done is None or not ledger.is_finished or changed(of_run(run), of_run(config)):
        return ""
    if config.from_scratch and not store.names(config.run_dir):
        return ""  # it begins anew
    if asks_for_another(config, ledger.branches):
        return ""
    asked = continued(config, run)
    if not (cause := used_up(asked, done["step"], done["tokens"], done["train_s"])):
        return ""
    why = why_ended(asked, cause, done["step"])
    if what := differences(of_run(run), of_run(config), KEPT):
        raise ConfigError(
            f"run {config.run_dir}: no step is left for {'; '.join(what)}: {why}; "
            "or give another --run-dir"
        )
    return why


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


# -- for the launcher, which refuses nothing that the trainer will ---------------------------------


def in_force(config: Config) -> Config:
    """The configuration with what is not given as the run has it, where there is one.

    Raises OSError for trouble that may pass.
    """
    with suppress(ConfigError):  # what is given and the run do not go together
        return continued(config, configuration(config.run_dir))
    return config


def why_finished(config: Config) -> str:
    """Why a start has no step to do; "" where it has. Raises ConfigError as `no_step_left` does."""
    with suppress(OSError):  # the trainer will see
        if config.run_dir and (found := read(config.run_dir)).is_finished:
            return no_step_left(config, configuration(config.run_dir), found)
    return ""
