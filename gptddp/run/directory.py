"""The run directory: the names of its files, its configuration, and the marker of a finished run.

config.json         the resolved configuration, and the run's id
dataset.json        which files the run began with
log.<n>.jsonl       a line a step, by the life of generation n; see history.py
ledger.jsonl        a line an event, over all lives; see history.py
checkpoints/        see checkpoint/store.py
faults/             the trainer's own errors; see crash_loop.py
lease.json          which job has the run; see lease.py
finished.json       the run is complete; here
"""

import contextlib
import dataclasses
import errno
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptddp.config import FIELDS, Config, differences, flag, with_preset
from gptddp.errors import ConfigError
from gptddp.files import may_pass, names_in, read_json, write_json_atomic

if TYPE_CHECKING:
    from gptddp.distributed.connect import World

CONFIG = "config.json"
DATASET = "dataset.json"
LEDGER = "ledger.jsonl"
CHECKPOINTS = "checkpoints"
FAULTS = "faults"
LEASE = "lease.json"
FINISHED = "finished.json"

log = logging.getLogger(__name__)

# A field that the run has fixed takes the run's value when it is left open; these do as well.
_KEPT = ("preset", "micro_batch", "steps", "lr", "warmup_steps", "eval_every", "eval_tokens")


def id_of(run: Path) -> str | None:
    """The id of the run directory's content; None where config.json is not there, or has none.

    Raises OSError where that cannot be told: an id is made only where there is nothing to lose.
    """
    with contextlib.suppress(ValueError, LookupError, TypeError):
        return str((_read_config(run) or {})["run_id"])
    return None


def saved_config(run: Path) -> dict[str, Any] | None:
    """The fields that the run was last started with; None where there is no run.

    Raises ConfigError where the file cannot be used; OSError for trouble that may pass.
    """
    try:
        saved = _read_config(run)
        return None if saved is None else dict(saved["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        if may_pass(error):
            raise
        raise ConfigError(
            f"{run / CONFIG} cannot be used ({error}): put it back from a backup, or remove it and "
            "give every flag that the run was begun with"
        ) from error


def _read_config(run: Path) -> Any | None:
    """The content of config.json; None where it is not there, as the directory's list says too."""
    saved = read_json(run / CONFIG)
    if saved is None and CONFIG in names_in(run):  # a network volume has lost its handle
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(run / CONFIG))
    return saved


def restore_config(run: Path, events: Sequence[Mapping[str, Any]]) -> None:
    """Where config.json is lost or torn: write it anew as the ledger (`events`) has it.

    The ledger of a run that was begun by an older version has none. Raises OSError.
    """
    path, aside = run / CONFIG, run / f"{CONFIG}.bad"
    torn = False
    try:
        if _read_config(run) is not None:
            return
    except ValueError:
        torn = True
    known: dict[str, Any] = {}
    for event in events:
        known |= {key: event[key] for key in ("run_id", "config") if event.get(key)}
    if known.keys() != {"run_id", "config"}:
        return
    if torn:
        with contextlib.suppress(FileNotFoundError):  # another pod was faster
            os.replace(path, aside)
    write_json_atomic(path, known)
    what = f"is torn (it is kept as {aside.name})" if torn else "is gone"
    log.warning("%s %s: it is written anew, as the ledger has it", path, what)


def resolve(config: Config, world: "World", continued: bool) -> Config:
    """Close every open field: by the run that is continued, else by preset and hardware.

    Raises ConfigError where a field is given that the run has fixed to another value.
    """
    from gptddp.distributed.hardware import has_fast_bf16  # torch, which the launcher has not yet

    if continued and (values := saved_config(Path(config.run_dir))) is not None:
        kept = [n for n, f in FIELDS.items() if f.metadata["fixed"] or n in _KEPT]
        open_fields = {n: values[n] for n in kept if getattr(config, n) is None and n in values}
        config = dataclasses.replace(config, **open_fields)
        if changed := differences(values, dataclasses.asdict(config)):
            flags = ", ".join(flag(line.split(":")[0]) for line in changed)
            raise ConfigError(
                f"run {config.run_dir} was begun with another configuration "
                f"({'; '.join(changed)}): leave out {flags} to continue it, "
                "or give another --run-dir"
            )
    if config.precision is None:
        fast = has_fast_bf16(world.device)
        config = dataclasses.replace(config, precision="bf16" if fast else "fp32")
    return with_preset(config, accelerator=world.device.type != "cpu")


# -- the marker of a finished run ----------------------------------------------------------------


def finish(c: Config, step: int, cause: str) -> None:
    """Rank 0 only, after the last checkpoint: write the marker. Raises OSError."""
    wanted = {"steps": c.steps, "max_time": c.max_time}
    marker = {"step": step, **wanted, "time": time.time(), "cause": cause}
    write_json_atomic(Path(c.run_dir) / FINISHED, marker)


def is_finished(config: Config) -> bool:
    """Is the run complete, as its marker says, and is nothing more asked for? False without a run.

    A run of another configuration is not this one: the trainer will refuse it, with the difference.
    """
    try:
        run = Path(config.run_dir) if config.run_dir else None
        if run is None or (marker := read_json(run / FINISHED)) is None:
            return False
        given = {name: v for name, v in dataclasses.asdict(config).items() if v is not None}
        if differences((read_json(run / CONFIG) or {}).get("config", {}), given):
            return False
        steps = config.steps or int(marker["steps"])
        out_of_time = 0 < config.max_time <= marker.get("max_time", 0)
        return bool(marker["step"] >= steps or out_of_time)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return False  # torn or foreign: the trainer will see
