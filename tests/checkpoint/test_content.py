"""A manifest or a snapshot that is whole, and says what this version cannot use.

Its hash is right, as another version or a hand has made it: the field is named, and the state
before it is used.
"""

import copy
import shutil
from pathlib import Path
from typing import Any

import xxhash
from support.checkpoints import meta, save, weights
from support.trainer_patches import lose_a_peer

from gptddp.checkpoint import retention, snapshot, store
from gptddp.checkpoint.load import load_newest
from gptddp.run.history import read_ledger

GONE = object()
META = [
    *[("meta", it) for it in (GONE, None, [])],
    *[("meta.step", it) for it in (GONE, None, "x")],
    *[("meta.chain_fp", it) for it in (GONE, 3, "x" * 16)],
    *[("meta.data", 3), ("meta.newer", 1)],
]
TENSORS = [
    *[("tensors.weights.dtype", it) for it in (GONE, 3, "float33", "nn", "float64")],
    *[("tensors.weights.offset", it) for it in (GONE, "x", 1, 1 << 40)],
    *[("tensors.weights.shape", it) for it in (GONE, [3], "x")],
    ("tensors.weights", None),
]
MANIFEST = [
    *[("step", it) for it in (GONE, None, "x", -1)],
    *[("run_id", it) for it in (GONE, None, 3, "theirs")],
    *[("format", it) for it in (GONE, None, "x", 0)],
    *[("shards", it) for it in (GONE, None, {}, [], [{}, {}])],
    *[("shards.0.file", it) for it in (GONE, 3, "../x")],
    *[("shards.0.chunk_bytes", it) for it in (GONE, "x", 0)],
    *[("shards.0.xxh3_128", it) for it in (GONE, [], ["0" * 32] * 2)],
    *[("meta.step", 1), ("tensors", None), ("time", None), ("generation", 9)],
]
SNAPSHOT = [
    *[(it, GONE) for it in ("run_id", "generation", "meta", "lines", "events", "fault")],
    *[(it, 3) for it in ("run_id", "meta", "lines", "events", "fault", "fault.cause", "lines.0")],
    *[("lines.0.time", "x"), ("events.0.event", 3)],
]


def changed(value: Any, where: str, to: Any) -> Any:
    """A copy with another value there, or none."""
    new = copy.deepcopy(value)
    *path, last = [int(it) if it.isdigit() else it for it in where.split(".")]
    inner = new
    for name in path:
        inner = inner[name]
    if to is GONE:
        del inner[last]
    else:
        inner[last] = to
    return new


def test_a_manifest_that_cannot_be_used_is_passed_over_by_name(tmp_path, caplog):
    """Whichever field is missing or wrong: no traceback, the checkpoint before it loads, the log
    has the field, and retention does not count what a start would refuse."""
    save(tmp_path, 1, meta=meta(1), size=400, run_id="mine")
    path = save(tmp_path, 2, meta=meta(2), size=400, run_id="mine")
    good = store.unsealed(path)
    assert load_newest(tmp_path, run_id="mine").step == 2
    for where, wrong in META + TENSORS + MANIFEST:
        (path / store.MANIFEST).write_bytes(store._seal(changed(good, where, wrong)))
        caplog.clear()
        assert load_newest(tmp_path, run_id="mine", set_aside=False).step == 1, (where, wrong)
        field = "weights" if "weights" in where else where.split(".")[-1]
        named = {"run_id": "it is of run", "generation": "belongs to", "step": "belongs to"}
        named = named.get(field, field)
        assert named in caplog.text or field in caplog.text, (where, wrong)
        if "weights" not in where:  # of which only torch knows
            assert not retention.verify(path, full=False, run_id="mine").ok, (where, wrong)


# -- in memory -------------------------------------------------------------------------------------

HEAD: dict[str, Any] = {
    "run_id": "mine",
    "generation": 1,
    "meta": meta(5),
    "lines": [{"step": 5, "time": 1.5, "loss": 2.0}],
    "events": [{"event": "start", "generation": 1, "time": 1.5}],
    "fault": {"cause": "a peer is lost", "time": 1.5},
}


def rewrite(path: Path, where: str, wrong: Any) -> None:
    """A snapshot whose description says something else, with its own hash."""
    raw = path.read_bytes()
    magic, size, digest, _ = snapshot._FOOTER.unpack(raw[-snapshot._FOOTER.size :])
    end = len(raw) - snapshot._FOOTER.size
    head = changed(snapshot.parse_json(raw[end - size : end]), where, wrong)
    text = snapshot.json.dumps(head).encode()
    footer = snapshot._FOOTER.pack(magic, len(text), digest, xxhash.xxh3_64_intdigest(text))
    path.write_bytes(raw[: end - size] + text + footer)


def test_a_snapshot_that_cannot_be_used_counts_as_absent(tmp_path, caplog):
    """Whichever field: a warning has it, and nothing is raised, in this life or in the next."""
    first, path = tmp_path / "first", tmp_path / "left"
    assert snapshot.write(first, {"weights": weights(5, 400)}, **HEAD)
    assert snapshot.usable(first).step == 5
    for where, wrong in META + TENSORS + SNAPSHOT:
        shutil.copy(first, path)
        rewrite(path, where, wrong)
        caplog.clear()
        assert snapshot.usable(path) is None, (where, wrong)
        assert "is not used: " in caplog.text, (where, wrong)


def test_a_run_goes_on_where_its_newest_states_cannot_be_used(run, tmp_path, caplog):
    """From the newest that can be, with the fields of both: the snapshot's and the checkpoint's."""
    for steps in ("2", "3"):
        assert run("--steps", steps) == 0
    path = tmp_path / "run/checkpoints/step-000000000003.2"
    manifest = store.unsealed(path)
    lose_a_peer(run, "--steps", "9", at=2)
    (path / store.MANIFEST).write_bytes(store._seal(changed(manifest, "meta.tokens", "x")))
    rewrite(snapshot.path_of(tmp_path / "memory", tmp_path / "run"), "generation", "x")
    assert run("--steps", "4") == 0
    assert "meta.tokens is 'x': it must be int" in caplog.text
    assert "generation is 'x': it must be int" in caplog.text
    starts = [event for event in read_ledger(tmp_path / "run") if event["event"] == "start"]
    assert starts[-1]["source"] == "step-000000000002.1" and path.exists()
