"""A snapshot: the file in shared memory by which a survivor of a fault hands the run's state on.

When a collective fails, every rank that lives still holds the parameters and the optimizer's state
of the last finished step: it writes a snapshot and exits. The next life of the run goes on from the
newest state among the checkpoints and the snapshots of all ranks, so that the loss of a pod costs
the step in flight and nothing else. In steady operation nothing is written (Just-In-Time
Checkpointing, EuroSys 2024).

    <folder>/gptddp-<hash of the run directory>
      the tensors' bytes, laid out as in a checkpoint
      JSON: of which run and life, and everything that is not a tensor
      footer: magic, the JSON's bytes, two hashes

A file gets its name when it is complete; one that is torn, foreign or damaged counts as absent.
"""

import contextlib
import errno
import hashlib
import json
import logging
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import xxhash

from gptddp.checkpoint.layout import layout, tensor_at, tensors_at
from gptddp.checkpoint.saved_state import SavedState
from gptddp.files import lock_now, parse_json
from gptddp.run import progress

_MAGIC = b"gptddp snap 1\0\0\0"
_FOOTER = struct.Struct("<16sQQQ")  # magic, bytes of the JSON, xxh3_64 of the tensors, of the JSON

log = logging.getLogger(__name__)


def path_of(folder: Path, run_dir: str | Path) -> Path:
    """The file of a run: its ranks in one pod share it, two runs on one machine do not."""
    name = hashlib.sha256(os.path.abspath(run_dir).encode()).hexdigest()[:16]
    return folder / f"gptddp-{name}"


def write(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    run_id: str,
    generation: int,
    meta: Mapping[str, Any],
    lines: Sequence[Mapping[str, Any]],
    fault: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]] = (),
) -> bool:
    """Write a snapshot; False where another rank of the pod does, or has this state or a newer one.

    Raises OSError, also where a link or another user's file is in the way. The older file goes
    first: there may not be room for two.
    """
    entries, nbytes = layout(tensors)
    head = {"run_id": run_id, "generation": generation, "meta": meta, "lines": lines}
    head |= {"events": events, "fault": fault, "nbytes": nbytes, "tensors": entries}
    text = json.dumps(head).encode()
    with _locked(_part(path)) as fd:
        if fd is None:
            return False
        try:
            held = _held(path, run_id)
            if held is not None and held >= (generation, meta["step"]):
                os.unlink(_part(path))
                return False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            _write_all(fd, entries, nbytes, tensors, text)
        except BaseException:
            os.unlink(_part(path))
            raise
        os.rename(_part(path), path)  # from now on the unfinished file is another's
        return True


def _write_all(
    fd: int,
    entries: Mapping[str, Any],
    nbytes: int,
    tensors: Mapping[str, torch.Tensor],
    text: bytes,
) -> None:
    """Tensors, text and footer, into room that is allocated before the first byte is written.

    A write to the mapping of a full tmpfs is SIGBUS.
    """
    os.ftruncate(fd, 0)
    os.posix_fallocate(fd, 0, nbytes + len(text) + _FOOTER.size)
    with mmap.mmap(fd, nbytes) as memory:
        digest = _fill(memory, entries, tensors)
    footer = _FOOTER.pack(_MAGIC, len(text), digest, xxhash.xxh3_64_intdigest(text))
    os.pwrite(fd, text + footer, nbytes)


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


@contextlib.contextmanager
def _locked(part: Path) -> Iterator[int | None]:
    """The unfinished file, made if need be, locked; None where another process has it locked.

    While it is locked nobody else renames or removes it. Raises OSError.
    """
    while True:
        fd = _open(part, os.O_RDWR | os.O_CREAT)
        try:
            try:
                lock_now(fd)
            except BlockingIOError:
                yield None
                return
            if _is_at(part, fd):
                yield fd
                return
        finally:
            os.close(fd)  # where it was not that file: it is another's snapshot by now, or gone


def _is_at(path: Path, fd: int) -> bool:
    """Is this the file of that name?"""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.lstat(path), os.fstat(fd))
    return False


def _open(path: Path, flags: int) -> int:
    """Open a file of our own: not through a link, nor one that another user has put there."""
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    status = os.fstat(fd)
    if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
        return fd
    os.close(fd)
    what = f"a file of user {status.st_uid} is in the place of a snapshot: remove it"
    raise PermissionError(errno.EPERM, what, str(path))


def _fill(
    memory: mmap.mmap, entries: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> int:
    """Copy the tensors to their places, and return the hash of all."""
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor_at(buffer, entries[name]).copy_(tensor)
    digest = xxhash.xxh3_64_intdigest(buffer.numpy().data)
    del buffer  # the mapping cannot be closed while it is lent out
    return digest


def read(path: Path) -> SavedState | None:
    """The snapshot in the file if every byte of it is as written; None otherwise, with a warning.

    No file is None without one. Never raises for what the file holds: there are checkpoints.
    """
    try:
        with open(_open(path, os.O_RDONLY), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # an empty file cannot be mapped
        log.warning("the state left in %s is not used: %s", path, error)
        return None
    try:
        return _parse(memory)
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        log.warning("the state left in %s is not used: it is damaged (%s)", path, error)
        return None


def usable(path: Path) -> SavedState | None:
    """The snapshot in the file if it can be gone on from; None otherwise, with a warning.

    Its hashes do not say which version has left it, nor whether by hand. Never raises.
    """
    if (found := read(path)) and (wrong := next(_wrong(vars(found)), None)):
        log.warning("the state left in %s is not used: %s", path, wrong)
        return None
    return found


_HEAD = {
    "run_id": str,
    "generation": int,
    "meta": dict,
    "lines": list,
    "events": list,
    "fault": dict,
}


def _wrong(head: Mapping[str, Any]) -> Iterator[str]:
    """The fields of a description that cannot be used. The first counts."""
    yield from progress.wrong(head, _HEAD)
    if why := progress.wrong_meta(head["meta"]):
        yield why
    for i, line in enumerate(head["lines"]):
        yield from progress.wrong(line, {"step": int, "time": int | float}, f"lines[{i}]")
    kinds = {"event": str, "generation": int, "time": float}
    for i, event in enumerate(head["events"]):
        yield from progress.wrong(event, kinds, f"events[{i}]")
    yield from progress.wrong(head["fault"], {"cause": str, "time": int | float}, "fault")


def _held(path: Path, run_id: str) -> tuple[int, int] | None:
    """Generation and step of this run's snapshot in the file; None where there is none."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, struct.error):
        with open(_open(path, os.O_RDONLY), "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with memory:
            head, _ = _description(memory)
            if head["run_id"] == run_id:
                return head["generation"], head["meta"]["step"]
    return None


def _description(memory: mmap.mmap) -> tuple[dict[str, Any], int]:
    """The JSON and the hash that the tensors should have; ValueError for what is torn."""
    magic, text_bytes, digest, text_digest = _FOOTER.unpack(memory[-_FOOTER.size :])
    end = len(memory) - _FOOTER.size
    if magic != _MAGIC or text_bytes > end:
        raise ValueError("it has no footer")
    text = memory[end - text_bytes : end]
    if xxhash.xxh3_64_intdigest(text) != text_digest:
        raise ValueError("its description does not have its hash")
    head = parse_json(text)
    if head["nbytes"] != end - text_bytes:
        raise ValueError(f"it should hold {head['nbytes']} bytes")
    return head, digest


def _parse(memory: mmap.mmap) -> SavedState:
    head, digest = _description(memory)
    nbytes = head["nbytes"]
    buffer = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
    data = buffer.numpy().data
    if xxhash.xxh3_64_intdigest(data) != digest:
        raise ValueError("its tensors do not have their hash")
    tensors = tensors_at(buffer, head["tensors"])
    own = {name: head[name] for name in _HEAD} | {"digest": digest}
    step, layout = head["meta"]["step"], head["tensors"]
    return SavedState("memory", step, tensors, **own, layout=layout, data=data)


def remove(path: Path) -> None:
    """Remove the snapshot, and what a killed rank has left unfinished.

    What a living one is writing stays: in its place another could begin, and the first would give
    that half a file its name.
    """
    with contextlib.suppress(OSError):
        os.unlink(path)
    with contextlib.suppress(OSError), _locked(_part(path)) as fd:
        if fd is not None:
            os.unlink(_part(path))
