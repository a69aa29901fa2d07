"""Is a run finished, and what would go on? The launcher asks before its rendezvous: no torch."""

from gptddp.budget import used_up
from gptddp.config import KEPT, Config
from gptddp.errors import ConfigError
from gptddp.flags import changed, continued, differences, of_run
from gptddp.run.branches import asks_for_another
from gptddp.run.history import has_checkpoints
from gptddp.run.summary import Summary


def why_finished(config: Config, run: Config, ledger: Summary) -> str:
    """Why a start with `config` has no step to do, as `why_ended` says it; "" where it has.

    `run`: the configuration in force. A start that fixes another value than the run has is the
    trainer's to refuse, with the difference. Raises ConfigError for other settings that no step
    would use, OSError.
    """
    done = ledger.finished
    if done is None or not ledger.is_finished or changed(of_run(run), of_run(config)):
        return ""
    if config.from_scratch and not has_checkpoints(config.run_dir):
        return ""  # it begins anew
    asked = continued(config, run)
    if asks_for_another(asked, ledger.branches):
        return ""
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
