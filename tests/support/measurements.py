"""What a fault has cost: the ledger's event of a recovery, and the files of what was measured."""

import json
import os
from pathlib import Path
from typing import Any

from gptddp.run.history import read_ledger


def recovery(run: Path, generation: int) -> dict[str, Any]:
    """The ledger's event of the first step of a life, with where the seconds went; {} before it."""
    wanted = ("recovered", generation)
    return next((e for e in read_ledger(run) if (e["event"], e["generation"]) == wanted), {})


def write_measurement(name: str, **values: Any) -> None:
    """Add a line to this file of the folder FAULTS_OUT, if there is one: tests/faults/table.py."""
    if folder := os.environ.get("FAULTS_OUT"):
        with open(Path(folder, name), "a") as file:
            file.write(json.dumps(values) + "\n")
