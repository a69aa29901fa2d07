"""Reads a run back from a tracker's files or server: (step, values) in order."""

import json
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Steps = list[tuple[int, dict[str, float]]]
_BLOCK = 32 << 10


def of_tensorboard(run: Path, name: str) -> Steps:
    """The steps as TensorBoard loads them from the folder, tag by tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if not (folder := run / "tensorboard" / name).exists():
        return []
    loaded = EventAccumulator(str(folder), {"scalars": 0})
    loaded.Reload()
    values: dict[int, dict[str, float]] = {}
    for tag in loaded.Tags()["scalars"]:
        for event in loaded.Scalars(tag):
            of_step = values.setdefault(event.step, {})
            assert tag not in of_step, f"step {event.step} has {tag} twice"
            of_step[tag] = event.value
    return list(values.items())


def of_wandb(run: Path, name: str) -> Steps:
    """The steps in the files that `wandb sync` would upload."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for file in sorted((run / "wandb").glob("offline-run-*/*.wandb")):
        for record in map(Record.FromString, _records(file.read_bytes())):
            if record.HasField("run"):
                assert record.run.display_name == name
            if record.HasField("history"):
                items = ((it.key or it.nested_key[0], it.value_json) for it in record.history.item)
                found.append((record.history.step.num, {k: json.loads(v) for k, v in items}))
    return found


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a wandb file, which is a LevelDB log. It has blocks; before each part of a
    record come its checksum, size and kind (1: the whole record, 4: its last part).
    """
    at, whole = 7, b""
    while at + 7 <= len(data):
        if (left := _BLOCK - at % _BLOCK) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + size > len(data):  # the record is being written, or was torn by a kill
            return
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


def of_trackio(run: Path, name: str) -> Steps:
    """The steps in the database of TRACKIO_DIR, of the server or of this machine."""
    import sqlite3

    found: list[Any] = []
    for path in Path(os.environ["TRACKIO_DIR"]).glob("*.db"):
        # the database may be incomplete yet
        with suppress(sqlite3.OperationalError), sqlite3.connect(path) as base:
            query = "SELECT step, metrics FROM metrics WHERE run_name = ? ORDER BY id"
            found += base.execute(query, (name,)).fetchall()
    return [(step, json.loads(values)) for step, values in found]


READERS = {"tensorboard": of_tensorboard, "wandb": of_wandb, "trackio": of_trackio}
