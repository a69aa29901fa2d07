"""What a continued run is given other values for: said, and in the ledger before the first step."""

import dataclasses
import logging
import math
from contextlib import closing

from gptddp.config import KEPT, Config, changed, differences
from gptddp.errors import ConfigError
from gptddp.files import TRANSIENT, explain
from gptddp.model.optim import lr_at
from gptddp.run.history import Ledger

log = logging.getLogger(__name__)


def record_changes(before: Config, config: Config, generation: int, step: int) -> bool:
    """Rank 0 only: say and record what has changed since the life before; has anything?

    To be called before the configuration is written down: where a life is killed in between, the
    next one records the same once more. Raises ConfigError where the ledger cannot be written, as
    no change may go unrecorded.
    """
    old, new = dataclasses.asdict(before), dataclasses.asdict(config)
    fields, what = changed(old, new, KEPT), differences(old, new, KEPT)
    if not fields:
        return False
    try:
        with closing(Ledger(config.run_dir)) as ledger:
            for name in fields:
                ledger.event(
                    "changed", generation, step=step, field=name, old=old[name], new=new[name]
                )
            ledger.sync()
    except OSError as error:
        if error.errno in TRANSIENT:
            raise
        raise ConfigError(
            f"run {config.run_dir}: the ledger cannot be written, and has to have what is changed "
            f"({'; '.join(what)}): {explain(error)}"
        ) from error
    for line in what:
        log.info("changed after step %d: %s", step, line)
    _tell_of_a_jump(before, config, step)
    return True


def _tell_of_a_jump(before: Config, config: Config, step: int) -> None:
    """The schedule is computed anew from step 0: the learning rate may rise again."""
    old, new = lr_at(step, before), lr_at(step, config)
    if step < config.steps and not math.isclose(old, new, rel_tol=0.01):
        log.warning(
            "the learning rate of step %d is %.1e instead of %.1e, as its schedule is computed "
            "anew: give another --lr if that is not meant",
            step + 1,
            new,
            old,
        )
