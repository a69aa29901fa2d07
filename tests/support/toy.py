"""What several test files use."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gptddp.distributed.watchdog import STOPS
from gptddp.run.history import read_ledger

# A model of 30 k parameters: a step of 8 rows takes milliseconds.
SMALL = [
    *("--n-layer", "2", "--n-head", "2", "--n-embd", "32", "--seq-len", "32"),
    *("--lanes", "8", "--batch", "8", "--micro-batch", "2", "--warmup-steps", "2"),
    *("--precision", "fp32", "--device", "cpu", "--eval-tokens", "512"),
    *("--cache-dir", "none"),
]


@contextlib.contextmanager
def training_here() -> Iterator[None]:
    """Train in this process: one thread, and pytest's signal handlers are put back."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("gptddp.distributed.connect.cpu_quota", lambda: 1)
        for number in STOPS:
            stack.callback(signal.signal, number, signal.getsignal(number))
        yield


def recovery(run: Path, generation: int) -> dict[str, Any]:
    """The ledger's event of the first step of a life, with where the seconds went; {} before it."""
    wanted = ("recovered", generation)
    return next((e for e in read_ledger(run) if (e["event"], e["generation"]) == wanted), {})


def write_measurement(name: str, **values: Any) -> None:
    """Add a line to this file of the folder FAULTS_OUT, if there is one: tests/faults/table.py."""
    if folder := os.environ.get("FAULTS_OUT"):
        with open(Path(folder, name), "a") as file:
            file.write(json.dumps(values) + "\n")
