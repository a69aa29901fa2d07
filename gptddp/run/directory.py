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
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptddp.budget import BUDGETS
from gptddp.config import FIELDS, KEPT, Config, with_preset
from gptddp.errors import ConfigError
from gptddp.files import may_pass, names_in, read_json, write_json_atomic
from gptddp.flags import changed, continued, differences, flag, from_saved, of_run
from gptddp.run.progress import Progress

if TYPE_CHECKING:
    from gptddp.distributed.connect import World

CONFIG = "config.json"
DATASET = "dataset.json"
LEDGER = "ledger.jsonl"
CHECKPOINTS = "checkpoints"
FAULTS = "faults"
SAMPLES = "samples.jsonl"
LEASE = "lease.json"
FINISHED = "finished.json"

_LOG = re.compile(r"log\.(\d{1,9})\.jsonl", re.ASCII)

log = logging.getLogger(__name__)


def log_path(run_dir: str | Path, generation: int) -> Path:
    """The log of a generation."""
    return Path(run_dir) / f"log.{generation}.jsonl"


def log_generations(run_dir: str | Path) -> list[int]:
    """The generations whose logs are there, in order. Raises OSError."""
    return sorted(int(m[1]) for name in names_in(run_dir) if (m := _LOG.fullmatch(name)))


def about(run: Path) -> dict[str, Any]:
    """All of config.json, as it is; ConfigError where it cannot be used. Raises OSError."""
    try:
        saved: dict[str, Any] = _read_config(run) or {"config": {}}
        from_saved(run / CONFIG, saved["config"])
        return saved
    except ValueError as error:
        raise ConfigError(
            f"{run / CONFIG} cannot be used ({error}): put it back from a backup, or move it away: "
            "the run's next start writes it anew, as the ledger has it"
        ) from error


def id_of(run: Path) -> str | None:
    """The id of the run directory's content; None where config.json is not there, or has none.

    Raises OSError where that cannot be told: an id is made only where there is nothing to lose.
    """
    with contextlib.suppress(ValueError, LookupError, TypeError):
        found = (_read_config(run) or {})["run_id"]
        return found if isinstance(found, str) else None
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


def config_of(run: Path) -> Config | None:
    """The configuration that the run was last started with; None where there is no run.

    Raises ConfigError where the file cannot be used; OSError for trouble that may pass.
    """
    values = saved_config(run)
    return None if values is None else from_saved(run / CONFIG, values)


def _read_config(run: Path) -> Any | None:
    """The content of config.json; None where it is not there, as the directory's list says too.

    Raises ValueError where it is torn or foreign, OSError where it cannot be read.
    """
    path = run / CONFIG
    saved = read_json(path)
    if saved is None and CONFIG in names_in(run):  # a network volume has lost its handle
        code = errno.ELOOP if path.is_symlink() else errno.ESTALE
        raise OSError(code, os.strerror(code), str(path))
    if isinstance(saved, dict) and "model_type" in saved:
        raise ConfigError(
            f"{run} is a model for transformers and no run: begin one with it in another folder, "
            f"by `gptddp train --init-from {run}`; `gptddp eval` takes it as it is"
        )
    if saved is not None and not (
        isinstance(saved, dict) and isinstance(saved.get("config"), dict)
    ):
        raise ValueError("it does not hold the configuration of a run")
    return saved


def save_config(run: Path, about: Mapping[str, Any], generation: int) -> None:
    """Write config.json, with the life that has this configuration and a hash. Raises OSError."""
    body = {**about, "generation": generation}
    write_json_atomic(run / CONFIG, {**body, "sha256": _seal(body)})


def life_of_config(run: Path) -> int:
    """The life that has written config.json; 0 where it is not as that was written, or unknown.

    Raises OSError where that cannot be told.
    """
    with contextlib.suppress(ValueError):
        saved = _read_config(run) or {}
        if type(life := saved.get("generation")) is int and not is_altered(saved):
            return life
    return 0


def is_altered(saved: Mapping[str, Any]) -> bool:
    """Is it not what was written, by a hand or a disk? Older versions have written no hash."""
    body = dict(saved)
    return body.pop("sha256", None) not in (None, _seal(body))


def _seal(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def restore_config(
    run: Path, run_id: str | None, config: Mapping[str, Any] | None, life: int
) -> None:
    """Where config.json is lost, torn or has what none can have: write it anew as the ledger has
    it, which has it of this life.

    The ledger of a run that was begun by an older version has none. Raises ConfigError where the
    two are of different runs, OSError.
    """
    path, aside = run / CONFIG, run / f"{CONFIG}.bad"
    torn = False
    try:
        if (saved := _read_config(run)) is not None:
            foreign = run_id and config and saved.get("run_id") != run_id
            if foreign and not (is_altered(saved) and saved["config"] == config):
                raise ConfigError(
                    f"{path} and {run / LEDGER} are of different runs: put the one that is not of "
                    "this run back from a backup, or move it away to go on without it"
                )
            usable = _can_be(saved["config"]) and not foreign
            if usable or not (config and _can_be(config)):
                return
            torn = True
    except ValueError:
        torn = True
    if not run_id or not config:
        return
    if torn:
        with contextlib.suppress(FileNotFoundError):  # another pod was faster
            os.replace(path, aside)
    save_config(run, {"run_id": run_id, "config": config}, life)
    what = f"is torn (it is kept as {aside.name})" if torn else "is gone"
    log.warning("%s %s: it is written anew, as the ledger has it", path, what)


def _can_be(values: Mapping[str, Any]) -> bool:
    """Is it a configuration of this version?"""
    try:
        from_saved(CONFIG, values)
    except ConfigError:
        return False
    return True


def update_config(run: Path, config: Mapping[str, Any], life: int) -> bool:
    """Have config.json say what the ledger does, of this life; True where it said something else.

    A life on a full disk may have left in memory alone what it has changed. Raises OSError, and
    ConfigError where the file cannot be used.
    """
    saved = saved_config(run) or {}
    if all(saved.get(name) == value for name, value in config.items()):
        return False
    if life_of_config(run) >= life:  # it is newer, and whole
        return False
    about = {n: v for n, v in (_read_config(run) or {}).items() if n != "sha256"}
    save_config(run, about | {"config": saved | dict(config)}, life)
    log.warning("%s: written anew, as the ledger has it", run / CONFIG)
    return True


def unknown_fields(run: Path) -> dict[str, Any]:
    """What a newer version has saved with the configuration, and this one does not know."""
    with contextlib.suppress(ConfigError, OSError):
        return {name: v for name, v in (saved_config(run) or {}).items() if name not in FIELDS}
    return {}


def resolve(
    config: Config, world: "World", begun: bool, recorded: Mapping[str, Any] | None = None
) -> tuple[Config, Config]:
    """The configuration of a life, every field closed, and that of the life before it.

    `begun`: this is not the first life of the run. What is not given is as the run has it; a new
    run is closed by preset, defaults and hardware, and given twice. `recorded`: what the newest
    life ran with, as the ledger has it. Raises ConfigError where a field is given that the run has
    fixed to another value.
    """
    run = config_of(Path(config.run_dir)) if begun else None
    if run is not None and recorded:
        run = _as_recorded(Path(config.run_dir), run, recorded)
    if run is None:
        new = _closed(config, world)
        return new, new
    before = _closed(run, world)
    if fields := changed(of_run(before), of_run(config)):
        what = "; ".join(differences(of_run(before), of_run(config)))
        job = f"; a job's manifest always names one: give it --preset {before.preset}"
        raise ConfigError(
            f"run {config.run_dir} was begun with another configuration ({what}): "
            f"leave out {', '.join(map(flag, fields))} to continue it, "
            f"or give another --run-dir{job if 'preset' in fields else ''}"
        )
    return continued(config, before), before


def _as_recorded(path: Path, saved: Config, recorded: Mapping[str, Any]) -> Config:
    """The run's configuration: the ledger's, which is written first, where config.json differs.

    So a change that a killed life has recorded stays, and no damage to config.json becomes one.
    """
    known = as_recorded(path, saved, recorded)
    old, new = of_run(saved), of_run(known)
    if what := [*differences(old, new), *differences(old, new, KEPT)]:
        log.warning(
            "%s is not what the newest life ran with, as %s has it: %s; the ledger counts. To "
            "change a field of the run, give its flag",
            path / CONFIG,
            LEDGER,
            "; ".join(what),
        )
    return known


def as_recorded(path: Path, saved: Config, recorded: Mapping[str, Any]) -> Config:
    """The run's configuration where the ledger has it too, which is written first.

    Raises ConfigError for values that no version can have written.
    """
    return continued(from_saved(path / LEDGER, recorded), saved)


def _closed(config: Config, world: "World") -> Config:
    from gptddp.distributed.hardware import numerics  # torch, which the launcher has not yet

    open_ = {k: v for k, v in numerics(world.device).items() if getattr(config, k) is None}
    if config.as_0_1:  # `use` decides the others at each start
        open_ = {k: v for k, v in open_.items() if k == "precision"}
    config = dataclasses.replace(config, **open_)
    return with_preset(config, accelerator=world.device.type != "cpu")


# -- the marker of a finished run ----------------------------------------------------------------


def finish(c: Config, run_id: str, life: int, progress: Progress, cause: str) -> None:
    """Rank 0 only, after the last checkpoint: write the marker. Raises OSError."""
    done: dict[str, Any] = {"generation": life, "step": progress.step}
    done |= {"tokens": progress.tokens, "train_s": progress.train_s}
    wanted = {name: getattr(c, name) for name in BUDGETS}
    marker = {"run_id": run_id, **done, **wanted, "time": time.time(), "cause": cause}
    write_json_atomic(Path(c.run_dir) / FINISHED, marker)
