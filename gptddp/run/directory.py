"""The run directory: the names of its files.

ledger.jsonl        a line an event, over all lives: what the run is; see summary.py
log.<n>.jsonl       a line a step, by the life of generation n; see history.py
checkpoints/        see checkpoint/store.py
faults/             the trainer's own errors; see crash_loop.py
samples.jsonl       texts of the model
lease.json          which job has the run; see lease.py
track.<name>.lock   held by what feeds a tracker; see track/feed.py
config.json, dataset.json, finished.json    copies for people; see copies.py
"""

import re
from pathlib import Path

from gptddp.files import exists, names_in

CONFIG = "config.json"
DATASET = "dataset.json"
LEDGER = "ledger.jsonl"
CHECKPOINTS = "checkpoints"
FAULTS = "faults"
SAMPLES = "samples.jsonl"
LEASE = "lease.json"
FINISHED = "finished.json"

_LOG = re.compile(r"log\.(\d{1,9})\.jsonl", re.ASCII)


def log_path(run_dir: str | Path, generation: int) -> Path:
    """The log of a generation."""
    return Path(run_dir) / f"log.{generation}.jsonl"


def log_generations(run_dir: str | Path) -> list[int]:
    """The generations whose logs are there, in order. Raises OSError."""
    return sorted(int(m[1]) for name in names_in(run_dir) if (m := _LOG.fullmatch(name)))


def is_run(path: Path) -> bool:
    """Has a folder anything that a run goes on from, or has logged? Raises OSError."""
    known = exists(path / LEDGER) or exists(path / CHECKPOINTS)
    return known or bool(log_generations(path))
