"""The run directory: the names of its files.

ledger.jsonl        one line per event, over all lives; see summary.py
log.<n>.jsonl       one line per step, by the life of generation n; see history.py
checkpoints/        see checkpoint/store.py
faults/             errors of the trainer; see crash_loop.py
samples.jsonl       texts of the model
lease.json          the job that holds the run; see lease.py
track.<name>.lock   held by the process that feeds a tracker; see track/feed.py
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
    """The generations that have a log, in order. Raises OSError."""
    return sorted(int(m[1]) for name in names_in(run_dir) if (m := _LOG.fullmatch(name)))


def is_run(path: Path) -> bool:
    """Does a folder have the ledger, the checkpoints or a log of a run? Raises OSError."""
    known = exists(path / LEDGER) or exists(path / CHECKPOINTS)
    return known or bool(log_generations(path))
