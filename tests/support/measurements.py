"""Files of measurements."""

import json
import os
from pathlib import Path
from typing import Any


def write_measurement(name: str, **values: Any) -> None:
    """Add a line for tests/faults/table.py to this file of the folder FAULTS_OUT, if set."""
    if folder := os.environ.get("FAULTS_OUT"):
        with open(Path(folder, name), "a") as file:
            file.write(json.dumps(values) + "\n")
