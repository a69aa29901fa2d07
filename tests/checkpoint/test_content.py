"""A complete manifest may have fields that this version cannot use.

Its hash is right, as another version or a person wrote it: the error names the field, and the
checkpoint before it is used.
"""

import copy
from typing import Any

from support.checkpoints import meta, save

from gptddp.checkpoint import retention, store
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


def changed(value: Any, where: str, to: Any) -> Any:
    """A copy in which the value at `where` is replaced by `to`, or removed."""
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


def test_an_unusable_manifest_is_skipped_and_named(tmp_path, caplog):
    """For any missing or wrong field there is no traceback: the checkpoint before it loads, the log
    names the field, and retention does not count the unusable one."""
    save(tmp_path, 1, meta=meta(1), size=400, run_id="mine")
    path = save(tmp_path, 2, meta=meta(2), size=400, run_id="mine")
    good = store.unsealed(path)
    assert load_newest(tmp_path, run_id="mine").step == 2
    for where, wrong in META + TENSORS + MANIFEST:
        (path / store.MANIFEST).write_bytes(store._seal(changed(good, where, wrong)))
        caplog.clear()
        assert load_newest(tmp_path, run_id="mine", set_aside=False).step == 1, (where, wrong)
        field = "weights" if "weights" in where else where.split(".")[-1]
        named = {"run_id": "it belongs to run", "generation": "belongs to", "step": "belongs to"}
        named = named.get(field, field)
        said = caplog.text.replace("step-0", "")  # a checkpoint's name has one of the fields
        assert named in said or field in said, (where, wrong)
        if "weights" not in where:  # only torch can check these
            assert not retention.verify(path, full=False, run_id="mine").ok, (where, wrong)


def test_a_run_continues_from_the_newest_usable_checkpoint(run, tmp_path, caplog):
    """The run skips the unusable checkpoint, and a warning names the field."""
    for steps in ("2", "3"):
        assert run("--steps", steps) == 0
    path = tmp_path / "run/checkpoints/step-000000000003.2"
    manifest = store.unsealed(path)
    (path / store.MANIFEST).write_bytes(store._seal(changed(manifest, "meta.tokens", "x")))
    assert run("--steps", "4") == 0
    assert "meta.tokens is 'x': it must be int" in caplog.text
    starts = [event for event in read_ledger(tmp_path / "run") if event["event"] == "start"]
    assert starts[-1]["source"] == "step-000000000002.1" and path.exists()
