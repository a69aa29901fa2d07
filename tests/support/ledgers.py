"""Ledgers that a test writes or changes."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gptddp.run.directory import LEDGER
from gptddp.run.summary import HASH, hash_of


def write(run: Path, events: Iterable[Mapping[str, Any]]) -> None:
    """Write these events. A start has its hash but no sums, so that readers read all before it."""
    run.mkdir(parents=True, exist_ok=True)
    lines = []
    for event in events:
        line = {"time": 1.0, "generation": 1, **event}
        if line["event"] == "start":
            line.pop("sums", None)
            line[HASH] = hash_of(line)
        lines.append(json.dumps(line) + "\n")
    (run / LEDGER).write_text("".join(lines))


def begun(run: Path, config: Mapping[str, Any], *events: Mapping[str, Any], **fields: Any) -> None:
    """Write a run whose first life began with this configuration and has these events."""
    write(run, [{"event": "start", "run_id": "a run", "config": dict(config), **fields}, *events])
