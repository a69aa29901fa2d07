"""Changed settings of a continued run: accepted and recorded, or refused."""

import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any

from gptddp.config import FIXED, KEPT, Config, with_preset
from gptddp.data.dataset import Dataset
from gptddp.distributed import environment
from gptddp.distributed.connect import World
from gptddp.distributed.hardware import numerics
from gptddp.errors import ConfigError, DataError
from gptddp.flags import changed, continued, differences, to_saved
from gptddp.run.summary import Summary
from gptddp.training.events import Events

log = logging.getLogger(__name__)


def resolve(config: Config, world: World, run: Config | None) -> Config:
    """The configuration of a life, with a value for every field.

    A field that is not given keeps the run's value; in a new run (None) it comes from preset,
    defaults and hardware. Raises ConfigError if a given value differs from one that is fixed.
    """
    if run is None:
        return _closed(config, world)
    return continued(config, _closed(run, world))


def _closed(config: Config, world: World) -> Config:
    chosen = numerics(world.device, config.precision)
    open_ = {k: v for k, v in chosen.items() if getattr(config, k) is None}
    config = dataclasses.replace(config, **open_)
    return with_preset(config, accelerator=world.device.type != "cpu")


def check_given(given: Sequence[Any], config: Config, names: Sequence[str]) -> None:
    """Compare the configurations given to these ranks (`of_run`) with the life's.

    The flags of rank 0 count, and any pod may become rank 0. So another value on a rank is logged.
    Raises ConfigError if the field is fixed.
    """
    mine = json.loads(json.dumps(dataclasses.asdict(config)))
    theirs = {name: it for name, it in zip(names, given, strict=True) if isinstance(it, dict)}
    for fate in (FIXED, KEPT):
        for name, fields in theirs.items():
            if what := "; ".join(differences(mine, fields, fate))[:300]:
                text = f"{name} was given another configuration than rank 0 ({what})"
                if fate == FIXED:
                    raise ConfigError(f"{text}: give all ranks the same flags")
                log.warning("%s: rank 0's is used; give all ranks the same flags", text)
                break


def identity(dataset: Dataset) -> dict[str, str | None]:
    """Hashes that decide a rank's rows and steps, beside the configuration."""
    tokenizer = dataset.tokenizer()
    library = None if dataset.pretokenized else tokenizer.library
    data = {"dataset": dataset.sha256, "tokenizer": tokenizer.sha256, "library": library}
    return {**data, "code": environment.code()}


def check_same_data(found: Sequence[Any], names: Sequence[str]) -> None:
    """Raise DataError, with both values, if an `identity` differs from the first."""
    for name, theirs in zip(names, found, strict=True):
        for what, mine in found[0].items():
            if isinstance(theirs, dict) and theirs.get(what) != mine:
                raise DataError(
                    f"{name} has another {what} than {names[0]} ({theirs.get(what)!s:.24} instead "
                    f"of {mine!s:.24}), so its steps would differ: give all ranks the same "
                    "data, and the same image or environment"
                )


def record(recorded: Summary, config: Config, step: int, events: Events) -> None:
    """Rank 0 only, before the first step: record the changes since the previous life."""
    if recorded.config is not None:
        before, now = recorded.config, to_saved(config)
        for field in changed(before, now, KEPT):
            events.emit("changed", step=step, field=field, old=before[field], new=now[field])
    if recorded.life and recorded.code != (code := environment.code()):
        events.emit("changed", step=step, field="code", old=recorded.code, new=code)
