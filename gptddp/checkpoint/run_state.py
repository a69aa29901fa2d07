"""Read the state of a run from its ledger or, if the ledger is lost, from a checkpoint.

Code that needs the run's id, its configuration, or whether it is finished calls `read` here. Code
that needs only the events (saves, log) calls `summary.read`.

If the ledger, or the start of a life that saved, is lost, the run's id and the configuration in
force come from the newest checkpoint, and an older end in the ledger does not count as the end of
the run. Lost with the ledger: the branches, the hash of the data, the row groups that were excluded
after that checkpoint, the names of the commits, and the sums (the rank-seconds, the start of the
run, the lives whose ranks differed, the job with --from-scratch). No state is read from
`config.json` and `finished.json`.
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
    """The state of a run; an empty one if there is no run. Raises OSError."""
    found, root = summary.read(run_dir), Path(run_dir) / CHECKPOINTS
    for name in filter(store.is_candidate, store.names(run_dir)):
        if store.order(name)[0] <= found.life:
            break  # the ledger has the starts of all older lives
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
    """The configuration in force. Raises ConfigError if none is recorded, OSError."""
    run = Path(run_dir)
    found = read(run)
    if found.config is not None:
        return from_saved(run / LEDGER, found.config)
    if not is_run(run):
        raise ConfigError(f"{run} is not a run directory: it has no {LEDGER} and no checkpoint")
    raise ConfigError(
        f"{run}: neither {LEDGER} nor a checkpoint has the configuration of the run: put one of "
        "them back from a backup"
    )


# -- is it finished? -----------------------------------------------------------------------------


def no_step_left(config: Config, run: Config, ledger: Summary) -> str:
    """Why a start with `config` has no step to do, from `why_ended`; "" if it has steps to do.

    `run`: the configuration in force. The trainer refuses a start that changes a fixed value.
    Raises ConfigError for other changed settings, as no step would use them, and OSError.
    """
    done = ledger.finished
    if done is None or not ledger.is_finished or changed(of_run(run), of_run(config)):
        return ""
    if config.from_scratch and not store.names(config.run_dir):
        return ""  # it begins at step 0
    if asks_for_another(config, ledger.branches):
        return ""
    asked = continued(config, run)
    if not (cause := used_up(asked, done["step"], done["tokens"], done["train_s"])):
        return ""
    why = why_ended(asked, cause, done["step"])
    if what := differences(of_run(run), of_run(config), KEPT):
        raise ConfigError(
            f"run {config.run_dir}: no step remains for {'; '.join(what)}: {why}, "
            "or give another --run-dir"
        )
    return why


def why_ended(c: Config, cause: str, step: int) -> str:
    """Why a run ended after `step` steps: the budget `cause`, and how to continue.

    A budget that is smaller than what the run has used undoes no step.
    """
    if cause == "max_time":
        return f"max_time of {c.max_time:g} s is used up; to continue, give a larger --max-time"
    if cause == "max_tokens":
        return f"max_tokens of {c.max_tokens} is used up; to continue, give a larger --max-tokens"
    if c.steps < step:
        return (
            f"steps is {c.steps}, but {step} steps are already done; to continue, give --steps "
            f"above {step}"
        )
    return f"all {c.steps} steps are done; to continue, give a larger --steps"


# -- for the launcher, which leaves all refusals to the trainer ------------------------------------


def in_force(config: Config) -> Config:
    """The configuration, with the run's values for all that is not given, if a run exists.

    Raises OSError for trouble that may pass.
    """
    with suppress(ConfigError):  # the given values contradict the run
        return continued(config, configuration(config.run_dir))
    return config


def why_finished(config: Config) -> str:
    """Why a start has no step to do, else "". Raises ConfigError like `no_step_left`."""
    with suppress(OSError):  # the trainer will report it
        if config.run_dir and (found := read(config.run_dir)).is_finished:
            return no_step_left(config, configuration(config.run_dir), found)
    return ""
