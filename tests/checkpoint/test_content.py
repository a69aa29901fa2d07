"""A manifest or a snapshot that is whole, and says what this version cannot use.

Its hash is right, as another version or a hand has made it: the field is named, and the state
before it is used.
"""

import copy
import math
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
NO_NUMBER = [GONE, None, "x", [], {}, True, -1, math.nan, math.inf]
NO_TEXT = [GONE, None, 3, [], {}]
NO_LIST = [GONE, None, 3, "x", {}, ["x"], [None]]
NO_OBJECT = [GONE, None, 3, "x", [], {"x": 1}]
WRONG: dict[type, list[Any]] = {
    **dict.fromkeys((int, float), NO_NUMBER),
    str: NO_TEXT,
    list: NO_LIST,
    dict: NO_OBJECT,
}
# What a field says, where its kind alone is right.
ODD = [
    (("meta", "step"), 1),
    (("meta", "chain_fp"), "x" * 16),
    (("meta", "newer"), 1),
    (("meta", "data", "lanes"), ""),
    (("meta", "data", "lanes"), "0.0 0.0"),
    (("meta", "data", "lanes"), "0.0.0, 0.0.0"),
    (("meta", "data", "quarantined"), ["x"]),
    (("meta", "data", "quarantined"), 3),
    (("shards", 0, "chunk_bytes"), 0),
    (("shards", 0, "xxh3_128"), ["0" * 32] * 2),
    (("tensors", "weights", "dtype"), "float33"),
    (("tensors", "weights", "dtype"), "nn"),
    (("tensors", "weights", "dtype"), "float64"),
    (("tensors", "weights", "offset"), 1),
    (("tensors", "weights", "offset"), 1 << 40),
    (("tensors", "weights", "shape"), [3]),
    (("shards",), [{}, {}]),
    (("run_id",), 3),
    (("format",), 0),
]
# At a start; the last is always the one shard.
UNUSED = {("parent",), ("verified",), *((("tensors", it, "shard")) for it in ("weights", "step"))}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value, but for the hashes and sizes in lists."""
    found = [path] if path else []
    if isinstance(value, dict):
        for name, inner in value.items():
            found += leaves(inner, (*path, name))
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        found += leaves(value[0], (*path, 0))
    return found


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for name in path:
        value = value[name]
    return value


def changed(value: Any, path: tuple[Any, ...], to: Any) -> Any:
    """A copy with another value there, or none."""
    new = copy.deepcopy(value)
    where = at(new, path[:-1])
    if to is GONE:
        del where[path[-1]]
    else:
        where[path[-1]] = to
    return new


def mistakes(good: Any, unused: set[tuple[Any, ...]]) -> list[tuple[tuple[Any, ...], Any]]:
    """Each field that is used: missing, or of each other kind."""
    return [
        (path, wrong)
        for path in leaves(good)
        if path not in unused
        for wrong in WRONG[type(at(good, path))]
    ]


def test_a_manifest_that_cannot_be_used_is_passed_over_by_name(tmp_path, caplog):
    """Whichever field is missing or wrong: no traceback, the checkpoint before it loads, the log
    has the field, and retention does not count what a start would refuse."""
    save(tmp_path, 1, meta=meta(1), size=400, run_id="mine")
    path = save(tmp_path, 2, meta=meta(2), size=400, run_id="mine")
    good = store.unsealed(path)
    assert load_newest(tmp_path, run_id="mine").step == 2
    cases = mistakes(good, UNUSED) + ODD
    for where, wrong in cases:
        if where[:-1] == ("tensors",) and wrong is GONE:
            continue  # a model has it, or not: see copy_into
        (path / store.MANIFEST).write_bytes(store._seal(changed(good, where, wrong)))
        caplog.clear()
        assert load_newest(tmp_path, run_id="mine", set_aside=False).step == 1, (where, wrong)
        # what only torch knows of, and reading
        late = where[0] == "tensors" and (where[1:] or wrong) or where[-1] == "xxh3_128"
        named = where[1] if where[0] == "tensors" and where[1:] else where[-1] or "shard"
        assert late or named in caplog.text or where == ("run_id",), (where, wrong)
        assert late or not retention.verify(path, full=False, run_id="mine").ok, (where, wrong)
    assert len(cases) > 250


def test_what_is_no_manifest_at_all_is_passed_over(tmp_path):
    """Its hash is right, and there is no object of JSON before it."""
    save(tmp_path, 1, meta=meta(1), size=400)
    path = save(tmp_path, 2, meta=meta(2), size=400)
    for body in (b"", b"[1", b'{"a":' * 100_000, b'{"a": \xff'):
        seal = b',"xxh3_128":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'"}\n'
        (path / store.MANIFEST).write_bytes(body + seal)
        assert load_newest(tmp_path, set_aside=False).step == 1


# -- in memory -------------------------------------------------------------------------------------

HEAD: dict[str, Any] = {
    "run_id": "mine",
    "generation": 1,
    "meta": meta(5),
    "lines": [{"step": 5, "time": 1.5, "loss": 2.0}],
    "events": [{"event": "start", "generation": 1, "time": 1.5}],
    "fault": {"cause": "a peer is lost", "time": 1.5},
}


def rewrite(path: Path, where: tuple[Any, ...], wrong: Any) -> None:
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
    unused = {("lines", 0, "loss"), ("events", 0), ("lines", 0)}
    cases = mistakes(HEAD, unused) + [it for it in ODD if it[0][0] in ("meta", "tensors")][1:]
    for where, wrong in cases:
        if where[0] in ("lines", "events") and wrong in ([], True):
            continue
        shutil.copy(first, path)
        rewrite(path, where, wrong)
        caplog.clear()
        assert snapshot.usable(path) is None, (where, wrong)
        assert "is not used: " in caplog.text, (where, wrong)
    assert len(cases) > 100


def test_an_event_of_which_the_rest_is_missing_is_left_out_of_the_sum(run, tmp_path):
    """One that a snapshot brings, as one that the ledger has: the run goes on from the snapshot."""
    lose_a_peer(run, "--steps", "9", at=2)
    event = {"event": "quarantine", "generation": 1, "time": 1.5}
    rewrite(snapshot.path_of(tmp_path / "memory", tmp_path / "run"), ("events",), [event])
    assert run("--steps", "3") == 0
    assert [e.get("source") for e in read_ledger(tmp_path / "run")].count("memory") == 1


def test_a_run_goes_on_where_its_newest_states_cannot_be_used(run, tmp_path, caplog):
    """From the newest that can be, with the fields of both: the snapshot's and the checkpoint's."""
    for steps in ("2", "3"):
        assert run("--steps", steps) == 0
    path = tmp_path / "run/checkpoints/step-000000000003.2"
    manifest = store.unsealed(path)
    lose_a_peer(run, "--steps", "9", at=2)
    (path / store.MANIFEST).write_bytes(store._seal(changed(manifest, ("meta", "tokens"), "x")))
    rewrite(snapshot.path_of(tmp_path / "memory", tmp_path / "run"), ("generation",), "x")
    assert run("--steps", "4") == 0
    assert "meta.tokens is 'x': it must be a whole number" in caplog.text
    assert "generation is 'x': it must be a whole number" in caplog.text
    starts = [event for event in read_ledger(tmp_path / "run") if event["event"] == "start"]
    assert starts[-1]["source"] == "step-000000000002.1" and path.exists()
