"""What a manifest has to say, and a snapshot: every field that is read of it, before it is read.

A hash proves that the bytes are as they were written, and not by whom: another version, another
run or a hand may have written them. Knows JSON, not files.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gptddp.run import progress

_NUMBER = (int, float)
_MANIFEST: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "generation": (int,),
    "time": _NUMBER,
    "tensors": (dict,),
    "meta": (dict,),
    "shards": (list,),
}
_SHARD: dict[str, tuple[type, ...]] = {
    "file": (str,),
    "nbytes": (int,),
    "chunk_bytes": (int,),
    "xxh3_128": (list,),
}
_TENSOR: dict[str, tuple[type, ...]] = {
    "dtype": (str,),
    "shape": (list,),
    "shard": (int,),
    "offset": (int,),
    "nbytes": (int,),
}
_IN_HEX = re.compile("[0-9a-f]{32}", re.ASCII)
_HEAD: dict[str, tuple[type, ...]] = {
    "run_id": (str,),
    "generation": (int,),
    "meta": (dict,),
    "lines": (list,),
    "events": (list,),
    "fault": (dict,),
}


def wrong_manifest(manifest: Any) -> str | None:
    """The first field of a manifest that cannot be used, with the rule; None where all can be."""
    return next(_wrong_manifest(manifest), None)


def _wrong_manifest(manifest: Any) -> Iterator[str]:
    yield from progress.wrong(manifest, _MANIFEST)
    for i, shard in enumerate(manifest["shards"]):
        yield from progress.wrong(shard, _SHARD, f"shards[{i}]")
        if shard["chunk_bytes"] < 1:
            yield f"shards[{i}].chunk_bytes is {shard['chunk_bytes']}: it must be at least 1"
        chunks = -(-shard["nbytes"] // shard["chunk_bytes"])
        if len(shard["xxh3_128"]) != chunks or not all(map(_is_hash, shard["xxh3_128"])):
            yield f"shards[{i}].xxh3_128 is not a hash of each of its {chunks} chunks"
    sizes = [shard["nbytes"] for shard in manifest["shards"]]
    yield from _wrong_tensors(manifest["tensors"], sizes)
    if type(manifest.get("run_id")) not in (str, type(None)):
        yield f"run_id is {manifest['run_id']!r:.40}: it must be text"
    if type(manifest.get("config")) not in (dict, type(None)):
        yield f"config is {manifest['config']!r:.40}: it must be an object"
    if type(manifest.get("code")) not in (str, type(None)):
        yield f"code is {manifest['code']!r:.40}: it must be text"


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and _IN_HEX.fullmatch(value) is not None


def _wrong_tensors(tensors: Mapping[str, Any], sizes: Sequence[int]) -> Iterator[str]:
    """Does each tensor lie within its shard, and do its numbers go into so many bytes?"""
    for name, entry in tensors.items():
        where = f"tensors[{name!r:.80}]"
        yield from progress.wrong(entry, _TENSOR, where)
        if not all(type(size) is int and size >= 0 for size in entry["shape"]):
            yield f"{where}.shape is {entry['shape']!r:.40}: it must be a list of sizes"
        end = entry["offset"] + entry["nbytes"]
        if entry["shard"] >= len(sizes) or end > sizes[entry["shard"]]:
            yield f"{where} does not lie within a shard"
        count = math.prod(entry["shape"])
        if entry["nbytes"] % count if count else entry["nbytes"]:
            yield f"{where} has {entry['nbytes']} bytes for {count} numbers"


def is_foreign(manifest: Mapping[str, Any], run_id: str | None) -> bool:
    """Is it of another run? Of which it is, version 0.1.0 has not said. None: no run asks."""
    return run_id is not None and manifest.get("run_id") not in (None, run_id)


def skipped(manifest: Mapping[str, Any]) -> int:
    """How many steps in a row were not finite when it was saved; foreign ones say nothing: 0."""
    meta = manifest.get("meta")
    found = meta.get("skipped") if isinstance(meta, dict) else 0
    return found if type(found) is int else 0


def refused(manifest: Mapping[str, Any], run_id: str | None) -> str | None:
    """Why a run cannot go on from it, with the rule and the fix; None where it can."""
    if run_id is None:
        return None
    if is_foreign(manifest, run_id):
        return (
            f"it is of run {manifest['run_id']!r:.40}, and this is run {run_id!r:.40} (run_id in "
            "ledger.jsonl): put this run's own checkpoints back, or go on with that run in its own "
            "--run-dir"
        )
    if why := progress.wrong_meta(manifest["meta"]):
        return f"{why}; use the version of gptddp that has written it"
    if manifest["meta"]["step"] != manifest["step"]:
        return f"meta.step is {manifest['meta']['step']}: it must be {manifest['step']}"
    return None


# -- snapshots -----------------------------------------------------------------------------------


def wrong_snapshot(head: Mapping[str, Any]) -> str | None:
    """The first field of a snapshot's description that cannot be used; None where all can be."""
    return next(_wrong_snapshot(head), None)


def _wrong_snapshot(head: Mapping[str, Any]) -> Iterator[str]:
    yield from progress.wrong(head, _HEAD)
    if why := progress.wrong_meta(head["meta"]):
        yield why
    for i, line in enumerate(head["lines"]):
        yield from progress.wrong(line, {"step": (int,), "time": _NUMBER}, f"lines[{i}]")
    kinds: dict[str, tuple[type, ...]] = {"event": (str,), "generation": (int,), "time": (float,)}
    for i, event in enumerate(head["events"]):
        yield from progress.wrong(event, kinds, f"events[{i}]")
    yield from _wrong_tensors(head["layout"], [len(head["data"])])
    yield from progress.wrong(head["fault"], {"cause": (str,), "time": _NUMBER}, "fault")
