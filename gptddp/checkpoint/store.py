"""A checkpoint on disk: names, manifest, commit, verification. Knows bytes, not tensors.

    checkpoints/
      step-000000000400.3/    step 400, committed by generation 3
        shard-0-of-1.bin      raw little-endian tensor bytes
        manifest.json         what the bytes are, their hashes, all state that is not a tensor
      step-000000000300.2.bad.1/    found damaged, kept for inspection, never loaded
      .tmp/  .trash/          being written, being deleted

A directory gets its name by one rename, after everything in it is durable, and is never
changed or written again. One without a valid manifest does not exist.

Newest means the highest (generation, step), not the highest step: a generation starts from the
newest checkpoint that was valid then, so a higher step of an older generation is a branch that
the run has left, be it the late commit of a writer cut off from its peers or a state given up.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from gptddp.checkpoint import shard
from gptddp.errors import CheckpointError, Unusable
from gptddp.files import exists, fsync, parse_json, patiently, write_new
from gptddp.run import progress
from gptddp.run.directory import CHECKPOINTS

FORMAT = 1
MANIFEST, TMP, TRASH = "manifest.json", ".tmp", ".trash"
_NAME = re.compile(r"step-(\d{12})\.(\d+)(\.bad\.\d+)?", re.ASCII)
_SEAL = b',"xxh3_128":"'


# -- names -------------------------------------------------------------------------------------


def name_of(step: int, generation: int) -> str:
    """The directory name of a checkpoint."""
    return f"step-{step:012d}.{generation}"


def order(name: str | None) -> tuple[int, int]:
    """(generation, step), by which checkpoints are ordered; zeros for any other name, or none."""
    match = _NAME.fullmatch(name or "")
    return (int(match[2]), int(match[1])) if match else (0, 0)


def names(run_dir: str | Path, known: Collection[str] = ()) -> list[str]:
    """All checkpoint names of a run, newest first, the set-aside `.bad` ones among them.

    `known`: names that the ledger has. They are asked for one by one, as a network file system may
    list a directory as it was a minute ago. Raises OSError where the directory is there but cannot
    be listed.
    """
    root = Path(run_dir) / CHECKPOINTS
    found: set[str] = set()
    with contextlib.suppress(FileNotFoundError):
        found.update(name for name in os.listdir(root) if any(order(name)))
    asked = (name for name in {*known} - found if any(order(name)))
    found.update(name for name in asked if exists(root / name, stat.S_ISDIR))
    return sorted(found, key=lambda name: (order(name), name), reverse=True)


def is_candidate(name: str) -> bool:
    """Is this the name of a checkpoint that has not been set aside as bad."""
    return any(order(name)) and ".bad." not in name


# -- manifest ----------------------------------------------------------------------------------


def _seal(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON whose last member is the hash of all bytes before it."""
    body = json.dumps(manifest, separators=(",", ":"))[:-1].encode()
    return body + _SEAL + xxh3_128_hexdigest(body).encode() + b'"}\n'


def unsealed(path: Path) -> dict[str, Any]:
    """What the manifest of a checkpoint says: as it was written, whoever did. Raises Unusable."""
    with shard.reading(path, MANIFEST):
        raw = (path / MANIFEST).read_bytes()
    body, _, rest = raw.rpartition(_SEAL)
    if rest != xxh3_128_hexdigest(body).encode() + b'"}\n':
        raise Unusable(path, f"{MANIFEST} does not match its own hash")
    try:
        manifest: dict[str, Any] = parse_json(body + b"}")  # nothing else ends so
    except ValueError as error:
        raise Unusable(path, f"{MANIFEST} is not JSON ({error})") from None
    known = type(manifest.get("format")) is int and manifest["format"] > 0
    if not known:
        raise Unusable(path, f"{MANIFEST} does not say its format, a whole number")
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint; its own hash, its fields and the sizes of all shards verified.

    Raises Unusable; CheckpointError where a newer version of gptddp has written it.
    """
    manifest = unsealed(path)
    if manifest["format"] > FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest['format']}, this gptddp reads up to {FORMAT}: "
            "use the version that wrote it, or move the checkpoint away to continue from an older"
        )
    if wrong := next(_wrong(manifest), None):
        raise Unusable(path, f"{MANIFEST}: {wrong}")
    name = name_of(manifest["step"], manifest["generation"])
    if name != path.name:
        raise Unusable(path, f"{MANIFEST} belongs to {name}")
    entry = manifest["shards"][0]
    with shard.reading(path, entry["file"]):
        size = os.stat(path / entry["file"]).st_size
    if size != entry["nbytes"]:
        raise Unusable(path, f"{entry['file']} has {size} bytes, not {entry['nbytes']}")
    return manifest


_FIELDS = {
    "step": int,
    "generation": int,
    "time": int | float,
    "run_id": str | None,
    "tensors": dict,
    "meta": dict,
    "shards": list,
}


def _wrong(manifest: Any) -> Iterator[str]:
    """The fields that cannot be used: a hash does not say who has written it. The first counts."""
    yield from progress.wrong(manifest, _FIELDS)
    if len(manifest["shards"]) != 1:
        yield f"shards has {len(manifest['shards'])} files: it must have one"
    yield from shard.wrong(manifest["shards"][0], "shards[0]")


def skipped(manifest: Mapping[str, Any]) -> int:
    """How many steps in a row were not finite when it was saved; 0 where it does not say."""
    meta = manifest.get("meta")
    found = meta.get("skipped") if isinstance(meta, dict) else 0
    return found if type(found) is int else 0


# -- whose it is ---------------------------------------------------------------------------------
#
# Another run of the same data and seed has checkpoints that fit in all else: a restore from the
# wrong backup would go on from them without a word. So each says the id of its run, and nobody
# takes up, counts or deletes one of another. `run_id` is None where no run asks.


def of_another(manifest: Mapping[str, Any], run_id: str | None) -> bool:
    """Does the manifest say another run?"""
    return run_id is not None and manifest.get("run_id") != run_id


def refused(manifest: Mapping[str, Any], run_id: str | None) -> str | None:
    """Why a run cannot go on from it, with the rule and the fix; None where it can."""
    if run_id is None:
        return None
    if of_another(manifest, run_id):
        return (
            f"it is of run {manifest['run_id']!r:.40}, and this is run {run_id!r:.40}: put this "
            "run's own checkpoints back, or go on with that run in its own --run-dir"
        )
    if why := progress.wrong_meta(manifest["meta"]):
        return f"{why}; use the version of gptddp that has written it"
    if manifest["meta"]["step"] != manifest["step"]:
        return f"meta.step is {manifest['meta']['step']}: it must be {manifest['step']}"
    return None


def is_foreign(path: Path, run_id: str | None, unknown: bool = False) -> bool:
    """Is this checkpoint another run's? A damaged one, which cannot say, counts as the run's own.

    `unknown`: what is returned where it cannot be read just now.
    """
    try:
        return run_id is not None and of_another(unsealed(path), run_id)
    except Unusable as unusable:
        return unusable.transient and unknown


def newest(run_dir: str | Path, run_id: str | None, known: Collection[str] = ()) -> str | None:
    """The name of this run's newest checkpoint that is not set aside. Raises OSError, as `names`.

    One that cannot be read, however often it is tried, counts by its name.
    """
    for name in filter(is_candidate, names(run_dir, known)):
        with contextlib.suppress(Unusable):
            if of_another(patiently(partial(unsealed, Path(run_dir) / CHECKPOINTS / name)), run_id):
                continue
        return name
    return None


# -- commit ------------------------------------------------------------------------------------


def commit(
    run_dir: str | Path,
    manifest: dict[str, Any],
    data: memoryview,
    before_rename: Callable[[], None] = lambda: None,
) -> str:
    """Write a checkpoint and return its name; whatever happens, it is there whole or not at all.

    `manifest` has step, generation and what else the reader needs; the shard's size and hashes are
    added here. Every byte is read again. `before_rename` runs when all is durable but the name: an
    exception from it undoes the commit. Raises OSError; FileExistsError where this step of this
    generation is there.
    """
    root = Path(run_dir) / CHECKPOINTS
    name = name_of(manifest["step"], manifest["generation"])
    work = root / TMP / f"{name}.{uuid.uuid4().hex}"
    work.mkdir(parents=True)
    try:
        entry = shard.write(work, data)
        _read_back(work, entry)
        raw = _seal({"format": FORMAT, **manifest, "shards": [entry]})
        write_new(work / MANIFEST, raw)
        fsync(work)
        before_rename()
        _rename_new(work, root / name, raw)
        fsync(root)
        fsync(run_dir)  # the first commit has made `checkpoints`
    finally:
        shutil.rmtree(work, ignore_errors=True)  # gone already after a success
    return name


def _read_back(work: Path, entry: dict[str, Any]) -> None:
    """Read what has been written; OSError where that is not what it should be."""
    try:
        shard.read(work, entry)
    except Unusable as unusable:
        raise OSError(
            errno.EIO,
            f"what was written is not what is read back ({unusable.reason}): the volume, or the "
            "way to it, is broken",
            str(work),
        ) from unusable


def _rename_new(work: Path, final: Path, manifest: bytes) -> None:
    """Give a finished checkpoint its name, which must be free."""
    try:
        if os.path.lexists(final):
            raise FileExistsError(errno.EEXIST, "this checkpoint exists already", str(final))
        os.rename(work, final)
    except OSError:
        # NFS repeats a rename whose answer was lost and then reports an error for the success.
        with contextlib.suppress(OSError):
            if (final / MANIFEST).read_bytes() == manifest:
                return
        raise
