"""What a continued run is given other values for: said, in the ledger, and then in config.json."""

import dataclasses
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gptddp import __version__
from gptddp.budget import used_up
from gptddp.config import FIXED, KEPT, Config
from gptddp.data.dataset import Dataset
from gptddp.distributed import environment
from gptddp.distributed.connect import World
from gptddp.errors import ConfigError, DataError
from gptddp.files import explain
from gptddp.flags import changed, differences
from gptddp.model.schedule import lr_at
from gptddp.run.directory import CONFIG, save_config, unknown_fields
from gptddp.run.origin import Origin
from gptddp.run.progress import Progress
from gptddp.training.events import Events

log = logging.getLogger(__name__)


def changes(before: Config, config: Config) -> list[dict[str, Any]]:
    """`field`, `old` and `new` of each field that a life has other than the life before it.

    Of those that are fixed, what a run of version 0.1.0 has left open: given once, it stays.
    """
    old, new = dataclasses.asdict(before), dataclasses.asdict(config)
    names = [*changed(old, new, KEPT), *changed(old, new)]
    return [{"field": it, "old": old[it], "new": new[it]} for it in names]


def check_given(given: Sequence[Any], config: Config, world: World) -> None:
    """Rank 0 only: what each rank was given (`of_run`, by rank), beside what the life runs with.

    The flags of rank 0 count, and any pod may become rank 0. So a rank that was given another value
    is told. Raises ConfigError where the field is fixed.
    """
    mine = json.loads(json.dumps(dataclasses.asdict(config)))
    theirs = {name: it for name, it in zip(world.names, given, strict=True) if isinstance(it, dict)}
    for of in (FIXED, KEPT):
        for name, fields in theirs.items():
            if what := "; ".join(differences(mine, fields, of))[:300]:
                text = f"{name} was given another configuration than rank 0 ({what})"
                if of == FIXED:
                    raise ConfigError(f"{text}: give all ranks the same flags")
                log.warning("%s: rank 0's counts; give all ranks the same flags", text)
                break


def identity(dataset: Dataset) -> dict[str, str | None]:
    """What decides a rank's rows, and its steps, beside the configuration."""
    tokenizer = dataset.tokenizer()
    library = None if dataset.pretokenized else tokenizer.library
    data = {"dataset": dataset.sha256, "tokenizer": tokenizer.sha256, "library": library}
    return {**data, "code": environment.code()}


def check_same_data(found: Sequence[Any], world: World) -> None:
    """Rank 0 only: `identity` of each rank is that of rank 0; else DataError, with both."""
    for name, theirs in zip(world.names, found, strict=True):
        for what, mine in found[0].items():
            if isinstance(theirs, dict) and theirs.get(what) != mine:
                raise DataError(
                    f"{name} has another {what} than rank 0 ({theirs.get(what)!s:.24} instead of "
                    f"{mine!s:.24}), so its steps would be others: give all ranks the same "
                    "data, and the same image or environment"
                )


def write_config(run: Path, run_id: str, config: Config, generation: int) -> None:
    """Write down what this life runs with, beside the fields of a newer version. Raises OSError."""
    if unknown := unknown_fields(run):
        log.warning(
            "%s has fields that gptddp %s does not know, and trains without: %s; use the version "
            "that the run was begun with",
            run / CONFIG,
            __version__,
            ", ".join(unknown),
        )
    about = {"version": __version__, "torch": torch.__version__, "run_id": run_id}
    save_config(run, about | {"config": fields_of(config) | unknown}, generation)


def fields_of(config: Config) -> dict[str, Any]:
    """The fields as a run keeps them."""
    fields = dataclasses.asdict(config)
    del fields["from_scratch"], fields["from_step"]  # of one start, and not of the run
    return fields


class Changes:
    """Rank 0 only: the changes of a life, in the ledger first, and with them in config.json.

    Where a life is killed in between, the next one goes on with what the ledger has. No checkpoint
    is committed before config.json has what its steps were done with.
    """

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._unsaved = bool(origin.changes)

    def record(self, events: Events) -> None:
        """Before the first step: say them, and have them written as soon as the disk allows."""
        origin = self._origin
        for it in origin.changes:
            events.emit("changed", step=origin.step, **it)
        before = {it["field"]: it["old"] for it in origin.changes}
        progress = Progress.from_meta(origin.meta)
        _tell_of_a_jump(dataclasses.replace(origin.config, **before), origin.config, progress)

    def try_to_save(self, trouble: str | None) -> None:
        """Once the ledger has them, or its `trouble` is known; else the next save does it."""
        try:
            if trouble is None:
                self.save()
        except OSError as error:
            trouble = explain(error)
        if self._unsaved:
            log.warning("the run goes on, but its directory cannot be written: %s", trouble)

    def save(self) -> None:
        """Before a checkpoint is committed, and after the ledger is durable. Raises OSError."""
        if self._unsaved:
            origin = self._origin
            run = Path(origin.config.run_dir)
            write_config(run, origin.run_id, origin.config, origin.generation)
            self._unsaved = False


def _tell_of_a_jump(before: Config, config: Config, progress: Progress) -> None:
    """The schedule is computed anew for the whole run: the learning rate may rise again."""
    step, tokens, train_s = progress.step, progress.tokens, progress.train_s
    old, new = (lr_at(step, c, tokens, train_s) for c in (before, config))
    if not used_up(config, step, tokens, train_s) and not math.isclose(old, new, rel_tol=0.01):
        log.warning(
            "the learning rate of step %d is %.1e instead of %.1e, as its schedule is computed "
            "anew: give another --lr if that is not meant",
            step + 1,
            new,
            old,
        )
