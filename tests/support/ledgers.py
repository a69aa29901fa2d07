"""Ledgers that a test has written itself, or changed."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gptddp.run.directory import LEDGER
from gptddp.run.summary import HASH, hash_of


def write(run: Path, events: Iterable[Mapping[str, Any]]) -> None:
    """The ledger of these events: a start has its hash, and no sums, so all before it is read."""
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
    """A run whose first life has begun with this configuration, and these events after it."""
    write(run, [{"event": "start", "run_id": "a run", "config": dict(config), **fields}, *events])
