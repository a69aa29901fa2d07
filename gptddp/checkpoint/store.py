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
import mmap
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from gptddp.distributed.pulse import beat
from gptddp.errors import CheckpointError, Unusable
from gptddp.files import (
    TRANSIENT,
    bypass_cache,
    exists,
    fsync,
    is_inside,
    parse_json,
    write_all,
    write_new,
)
from gptddp.run import progress
from gptddp.run.directory import CHECKPOINTS

FORMAT = 1
CHUNK_BYTES = 16 << 20  # hashed and written at once
MANIFEST, SHARD, TMP, TRASH = "manifest.json", "shard-0-of-1.bin", ".tmp", ".trash"
_NAME = re.compile(r"step-(\d{12})\.(\d+)(\.bad\.\d+)?", re.ASCII)
_SEAL = b',"xxh3_128":"'
# These prove damage: there is no file, or not a file. Other errors prove nothing.
_DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)


# -- names -------------------------------------------------------------------------------------


def name_of(step: int, generation: int) -> str:
    """The directory name of a checkpoint."""
    return f"step-{step:012d}.{generation}"


def order(name: str) -> tuple[int, int] | None:
    """(generation, step), by which checkpoints are ordered; None for any other name."""
    match = _NAME.fullmatch(name)
    return (int(match[2]), int(match[1])) if match else None


def names(run_dir: str | Path, known: Collection[str] = ()) -> list[str]:
    """All checkpoint names of a run, newest first, the set-aside `.bad` ones among them.

    `known`: names that the ledger has. They are asked for one by one, as a network file system may
    list a directory as it was a minute ago. Raises OSError where the directory is there but cannot
    be listed.
    """
    root = Path(run_dir) / CHECKPOINTS
    found: set[str] = set()
    with contextlib.suppress(FileNotFoundError):
        found.update(name for name in os.listdir(root) if order(name))
    asked = (name for name in {*known} - found if order(name))
    found.update(name for name in asked if exists(root / name, stat.S_ISDIR))
    return sorted(found, key=lambda name: (order(name), name), reverse=True)


def is_candidate(name: str) -> bool:
    """Is this the name of a checkpoint that has not been set aside as bad."""
    return order(name) is not None and ".bad." not in name


# -- manifest ----------------------------------------------------------------------------------


def _seal(manifest: dict[str, Any]) -> bytes:
    """The manifest as JSON whose last member is the hash of all bytes before it."""
    body = json.dumps(manifest, separators=(",", ":"))[:-1].encode()
    return body + _SEAL + xxh3_128_hexdigest(body).encode() + b'"}\n'


def unsealed(path: Path) -> dict[str, Any]:
    """What the manifest of a checkpoint says: as it was written, whoever did. Raises Unusable."""
    with _reading(path, MANIFEST):
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


@contextlib.contextmanager
def _reading(path: Path, file: str) -> Iterator[None]:
    """Turn an OSError into Unusable, with whether it proves damage."""
    try:
        yield
    except OSError as error:
        reason, code = f"{file}: {error.strerror}", error.errno
        raise Unusable(
            path, reason, damaged=code in _DAMAGE, transient=code in TRANSIENT
        ) from error


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
    shard = manifest["shards"][0]
    with _reading(path, shard["file"]):
        size = os.stat(path / shard["file"]).st_size
    if size != shard["nbytes"]:
        raise Unusable(path, f"{shard['file']} has {size} bytes, not {shard['nbytes']}")
    return manifest


_NUMBER = (int, float)
_FIELDS: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "generation": (int,),
    "time": _NUMBER,
    "run_id": (type(None), str),
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


def _wrong(manifest: Any) -> Iterator[str]:
    """The fields that cannot be used: a hash does not say who has written it. The first counts."""
    yield from progress.wrong(manifest, _FIELDS)
    if len(manifest["shards"]) != 1:
        yield f"shards has {len(manifest['shards'])} files: it must have one"
    shard = manifest["shards"][0]
    yield from progress.wrong(shard, _SHARD, "shards[0]")
    if os.path.basename(shard["file"]) != shard["file"] or not is_inside(shard["file"]):
        yield f"shards[0].file is {shard['file']!r}: it must be a file in the checkpoint's folder"
    if shard["chunk_bytes"] < 1:
        yield f"shards[0].chunk_bytes is {shard['chunk_bytes']}: it must be at least 1"
    if len(shard["xxh3_128"]) != -(-shard["nbytes"] // shard["chunk_bytes"]):
        yield "shards[0].xxh3_128 is not a hash of each chunk"


def refused(manifest: Mapping[str, Any], run_id: str | None) -> str | None:
    """Why a run cannot go on from it, with the rule and the fix; None where it can."""
    if is_foreign(manifest, run_id):
        return (
            f"it is of run {manifest.get('run_id')!r:.40}, and this is run {run_id!r:.40}: put "
            "this run's own checkpoints back, or go on with that run in its own --run-dir"
        )
    if run_id is None:
        return None
    if why := progress.wrong_meta(manifest["meta"]):
        return f"{why}; use the version of gptddp that has written it"
    if manifest["meta"]["step"] != manifest["step"]:
        return f"meta.step is {manifest['meta']['step']}: it must be {manifest['step']}"
    return None


def is_foreign(manifest: Mapping[str, Any], run_id: str | None) -> bool:
    """Is it another run's? None: no run asks."""
    return run_id is not None and manifest.get("run_id") != run_id


def skipped(manifest: Mapping[str, Any]) -> int:
    """How many steps in a row were not finite when it was saved; 0 where it does not say."""
    meta = manifest.get("meta")
    found = meta.get("skipped") if isinstance(meta, dict) else 0
    return found if type(found) is int else 0


def read_shard(
    path: Path,
    manifest: Mapping[str, Any],
    buffer: memoryview | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> None:
    """Read every chunk and compare its hash, into the buffer or, with None, nowhere.

    With None it is the device that is read, not the page cache, where the volume lets us. `tell` is
    told how much has been read. Raises Unusable.
    """
    shard = manifest["shards"][0]
    chunk_bytes, nbytes = shard["chunk_bytes"], shard["nbytes"]
    with _reading(path, shard["file"]), open(path / shard["file"], "rb", buffering=0) as file:
        scratch = memoryview(_uncached(file, chunk_bytes)) if buffer is None else None
        for begin, expected in zip(range(0, nbytes, chunk_bytes), shard["xxh3_128"], strict=True):
            beat()  # a large one may take many minutes
            end = min(begin + chunk_bytes, nbytes)
            tell(f"reading {path.name}, {begin / 1e9:.2f} of {nbytes / 1e9:.2f} GB")
            into = scratch if buffer is None else buffer[begin:end]
            assert into is not None
            if not _fill(into, file, end - begin) or (
                xxh3_128_hexdigest(into[: end - begin]) != expected
            ):
                raise Unusable(
                    path, f"{shard['file']}: bytes {begin} to {end} do not match their hash"
                )


def _uncached(file: Any, nbytes: int) -> mmap.mmap:
    """A buffer to read a file into that is to come from the device.

    Its address and size are multiples of a page, as O_DIRECT wants them.
    """
    with contextlib.suppress(OSError):  # for a file system that has no O_DIRECT
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    bypass_cache(file.fileno())
    return mmap.mmap(-1, -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE)


def _fill(into: memoryview, file: Any, nbytes: int) -> bool:
    """Read so many bytes, or more where the buffer is larger; False where the file ends before."""
    done = 0
    while done < nbytes:
        try:
            count = file.readinto(into[done:])
        except OSError as error:  # bytes that are no whole blocks
            if error.errno != errno.EINVAL or not bypass_cache(file.fileno(), False):
                raise
            continue
        if not count:
            return False
        done += count
    return True


# -- commit ------------------------------------------------------------------------------------


def commit(
    run_dir: str | Path,
    manifest: dict[str, Any],
    data: memoryview,
    before_rename: Callable[[], None] = lambda: None,
    read_back: bool = True,
    wrote: Callable[[], None] = lambda: None,
) -> str:
    """Write a checkpoint and return its name; whatever happens, it is there whole or not at all.

    `manifest` has step, generation and what else the reader needs; the shard's size and hashes are
    added here. With `read_back` every byte is read again, and the manifest says that it was
    `verified`. `before_rename` runs when all is durable but the name: an exception from it undoes
    the commit. `wrote` is called after each chunk. Raises OSError; FileExistsError where this step
    of this generation is there.
    """
    root = Path(run_dir) / CHECKPOINTS
    name = name_of(manifest["step"], manifest["generation"])
    work = root / TMP / f"{name}.{uuid.uuid4().hex}"
    work.mkdir(parents=True)
    try:
        shards = {"shards": [_write_shard(work / SHARD, data, wrote)]}
        if read_back:
            _read_back(work, shards)
        raw = _seal({"format": FORMAT, **manifest, **shards, "verified": read_back})
        write_new(work / MANIFEST, raw)
        fsync(work)
        before_rename()
        _rename_new(work, root / name, raw)
        fsync(root)
        fsync(run_dir)  # the first commit has made `checkpoints`
    finally:
        shutil.rmtree(work, ignore_errors=True)  # gone already after a success
    return name


def _read_back(work: Path, shards: dict[str, Any]) -> None:
    """Read what has been written; OSError where that is not what it should be."""
    try:
        read_shard(work, shards)
    except Unusable as unusable:
        raise OSError(
            errno.EIO,
            f"what was written is not what is read back ({unusable.reason}): the volume, or the "
            "way to it, is broken",
            str(work),
        ) from unusable


def _write_shard(path: Path, data: memoryview, wrote: Callable[[], None]) -> dict[str, Any]:
    """Write one shard durably; its entry in the manifest."""
    hashes = []
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        bypass_cache(fd)
        for begin in range(0, len(data), CHUNK_BYTES):
            chunk = data[begin : begin + CHUNK_BYTES]
            hashes.append(xxh3_128_hexdigest(chunk))
            write_all(fd, chunk)
            wrote()
        os.fsync(fd)
    finally:
        os.close(fd)  # NFS may report a failed write only here
    return {
        "file": path.name,
        "nbytes": len(data),
        "chunk_bytes": CHUNK_BYTES,
        "xxh3_128": hashes,
    }


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
