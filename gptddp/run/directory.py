"""The run directory: its configuration, its lives, and where each one goes on."""

import contextlib
import dataclasses
import logging
import time
import uuid
from pathlib import Path
from typing import Any

from gptddp.config import FIELDS, Config, differences, flag, with_preset
from gptddp.distributed.connect import World
from gptddp.distributed.hardware import has_fast_bf16
from gptddp.errors import ConfigError
from gptddp.files import read_json, write_json_atomic

log = logging.getLogger(__name__)

# A field that the run has fixed takes the run's value when it is left open; these do as well.
_KEPT = ("preset", "micro_batch", "steps", "lr", "warmup_steps", "eval_every", "eval_tokens")


def id_of(run: Path) -> str:
    """The id of the run directory's content; a new one where it has none."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return str((read_json(run / "config.json") or {})["run_id"])
    return uuid.uuid4().hex


def saved_config(run: Path) -> dict[str, Any] | None:
    """The fields that the run was last started with; None where there is no run."""
    path = run / "config.json"
    try:
        saved = read_json(path)
        return None if saved is None else dict(saved["config"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} cannot be used ({error}): put it back from a backup, or remove it and give "
            "every flag that the run was begun with"
        ) from error


def resolve(config: Config, dist: World, continued: bool) -> Config:
    """Close every open field: by the run that is continued, else by preset and hardware."""
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
        fast = has_fast_bf16(dist.device)
        config = dataclasses.replace(config, precision="bf16" if fast else "fp32")
    return with_preset(config, accelerator=dist.device.type != "cpu")


def finish(c: Config, step: int, cause: str) -> None:
    """Rank 0 only, after the last checkpoint: leave the marker that a later start reads first."""
    wanted = {"steps": c.steps, "max_time": c.max_time}
    marker = {"step": step, **wanted, "time": time.time(), "cause": cause}
    write_json_atomic(Path(c.run_dir) / "finished.json", marker)
