"""A checkpoint on disk: names, manifest, commit, verification. Knows bytes, not tensors.

    checkpoints/
      step-000000000400.3/    step 400, committed by generation 3
        shard-0-of-1.bin      raw little-endian tensor bytes
        manifest.json         layout and hashes of the bytes, all state that is not a tensor
      step-000000000300.2.bad.1/    found damaged, kept for inspection, never loaded
      .tmp/  .trash/          being written, being deleted

A directory gets its name by one rename, after everything in it is durable, and is never
changed or written again. A directory without a valid manifest is not a checkpoint.

Newest means the highest (generation, step), not the highest step: a generation starts from the
newest checkpoint that was valid then, so the run has discarded a higher step of an older
generation: the late commit of a writer that was cut off from its peers, or a state given up.
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
    """The sort key of a checkpoint: (generation, step); zeros for any other name, or None."""
    match = _NAME.fullmatch(name or "")
    return (int(match[2]), int(match[1])) if match else (0, 0)


def names(run_dir: str | Path, known: Collection[str] = ()) -> list[str]:
    """All checkpoint names of a run, newest first, including the set-aside `.bad` ones.

    `known`: names in the ledger. Each of them is looked up, as a network file system may list a
    directory as it was a minute ago. Raises OSError if the directory exists but cannot be listed.
    """
    root = Path(run_dir) / CHECKPOINTS
    found: set[str] = set()
    with contextlib.suppress(FileNotFoundError):
        found.update(name for name in os.listdir(root) if any(order(name)))
    asked = (name for name in {*known} - found if any(order(name)))
    found.update(name for name in asked if exists(root / name, stat.S_ISDIR))
    return sorted(found, key=lambda name: (order(name), name), reverse=True)


def is_candidate(name: str) -> bool:
    """Is this the name of a checkpoint that has not been set aside as bad?"""
    return any(order(name)) and ".bad." not in name


# -- manifest ----------------------------------------------------------------------------------


def _seal(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON whose last member is the hash of all bytes before it."""
    body = json.dumps(manifest, separators=(",", ":"))[:-1].encode()
    return body + _SEAL + xxh3_128_hexdigest(body).encode() + b'"}\n'


def unsealed(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, with only its hash and format checked. Raises Unusable."""
    with shard.reading(path, MANIFEST):
        raw = (path / MANIFEST).read_bytes()
    body, _, rest = raw.rpartition(_SEAL)
    if rest != xxh3_128_hexdigest(body).encode() + b'"}\n':
        raise Unusable(path, f"{MANIFEST} does not match its own hash")
    try:
        manifest: dict[str, Any] = parse_json(body + b"}")  # an object: no other value ends with }
    except ValueError as error:
        raise Unusable(path, f"{MANIFEST} is not JSON ({error})") from None
    known = type(manifest.get("format")) is int and manifest["format"] > 0
    if not known:
        raise Unusable(path, f"{MANIFEST} has no valid format: it must be a whole number above 0")
    return manifest


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, with its hash, its fields and the sizes of all shards checked.

    Raises Unusable; CheckpointError if a newer version of gptddp wrote it.
    """
    manifest = unsealed(path)
    if manifest["format"] > FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest['format']}, this gptddp reads up to {FORMAT}: use the "
            "version that wrote it, or move the checkpoint away to continue from an older one"
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
    """Yield the invalid fields: a valid hash does not prove valid fields. Use only the first."""
    yield from progress.wrong(manifest, _FIELDS)
    if len(manifest["shards"]) != 1:
        yield f"shards has {len(manifest['shards'])} files: it must have one"
    yield from shard.wrong(manifest["shards"][0], "shards[0]")


def skipped(manifest: Mapping[str, Any]) -> int:
    """The number of non-finite steps in a row at the time of the save; 0 if unknown."""
    meta = manifest.get("meta")
    found = meta.get("skipped") if isinstance(meta, dict) else 0
    return found if type(found) is int else 0


# -- the run of a checkpoint -----------------------------------------------------------------------
#
# Checkpoints of another run with the same data and seed fit in all other respects: after a restore
# from the wrong backup, a run would silently continue from them. So each has the id of its run, and
# no run loads, counts or deletes one of another. `run_id` None: any run is accepted.


def of_another(manifest: Mapping[str, Any], run_id: str | None) -> bool:
    """Does the manifest belong to another run?"""
    return run_id is not None and manifest.get("run_id") != run_id


def refused(manifest: Mapping[str, Any], run_id: str | None) -> str | None:
    """Why a run cannot resume from it, with the rule and the fix; None if it can."""
    if run_id is None:
        return None
    if of_another(manifest, run_id):
        return (
            f"it belongs to run {manifest['run_id']!r:.40}, and this is run {run_id!r:.40}: put "
            "this run's own checkpoints back, or continue that run in its own --run-dir"
        )
    if why := progress.wrong_meta(manifest["meta"]):
        return f"{why}; use the version of gptddp that wrote it"
    if manifest["meta"]["step"] != manifest["step"]:
        return f"meta.step is {manifest['meta']['step']}: it must be {manifest['step']}"
    return None


def is_foreign(path: Path, run_id: str | None, unknown: bool = False) -> bool:
    """Is this checkpoint another run's? A damaged one counts as the run's own.

    `unknown`: the result if it cannot be read at present.
    """
    try:
        return run_id is not None and of_another(unsealed(path), run_id)
    except Unusable as unusable:
        return unusable.transient and unknown


def newest(run_dir: str | Path, run_id: str | None, known: Collection[str] = ()) -> str | None:
    """The name of this run's newest checkpoint that is not set aside. Raises OSError, as `names`.

    A checkpoint that cannot be read, even after retries, counts by its name.
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
    """Write a checkpoint and return its name; whatever happens, it is complete or absent.

    `manifest` has step, generation and all other fields for the reader, except the shard's size and
    hashes. Every byte is read again. `before_rename` runs when all is durable but the name: an
    exception from it undoes the commit. Raises OSError; FileExistsError if this step of this
    generation exists.
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
        fsync(run_dir)  # the first commit created `checkpoints`
    finally:
        shutil.rmtree(work, ignore_errors=True)  # absent after a success
    return name


def _read_back(work: Path, entry: dict[str, Any]) -> None:
    """Read the written bytes again. Raises OSError if they differ."""
    try:
        shard.read(work, entry)
    except Unusable as unusable:
        raise OSError(
            errno.EIO,
            f"the bytes read back are not those written ({unusable.reason}): the volume, or the "
            "connection to it, is broken",
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
