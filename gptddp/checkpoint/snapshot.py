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
import fcntl
import hashlib
import json
import logging
import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from gptddp.checkpoint.layout import layout, tensor_at

_MAGIC = b"gptddp snap 1\0\0\0"
_FOOTER = struct.Struct("<16sQQQ")  # magic, bytes of the JSON, xxh3_64 of the tensors, of the JSON

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """A verified snapshot: its tensors are views of the file, which is never written again."""

    run_id: str
    generation: int  # of the life that wrote it
    meta: dict[str, Any]  # as in a checkpoint
    lines: list[dict[str, Any]]  # of the log, since the newest checkpoint or so
    fault: dict[str, Any]  # why it was written: cause, and time in unix seconds
    tensors: dict[str, torch.Tensor]
    digest: int  # of the tensors' bytes
    layout: dict[str, Any]  # of the tensors, as in a checkpoint
    data: memoryview  # their bytes, as in a checkpoint

    @property
    def step(self) -> int:
        return int(self.meta["step"])


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
) -> bool:
    """Write a snapshot; False where another rank of the pod does, or has. Raises OSError.

    The older file goes first: there may not be room for two. The room is allocated before the first
    byte is written, because a write to the mapping of a full tmpfs is SIGBUS.
    """
    entries, nbytes = layout(tensors)
    head = {
        "run_id": run_id,
        "generation": generation,
        "meta": meta,
        "lines": lines,
        "fault": fault,
    }
    text = json.dumps({**head, "nbytes": nbytes, "tensors": entries}).encode()
    part = path.with_name(f"{path.name}.part")
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            if _holds(path, (run_id, generation, meta["step"])):
                os.unlink(part)
                return False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            os.ftruncate(fd, 0)
            os.posix_fallocate(fd, 0, nbytes + len(text) + _FOOTER.size)
            with mmap.mmap(fd, nbytes) as memory:
                digest = _fill(memory, entries, tensors)
            footer = _FOOTER.pack(_MAGIC, len(text), digest, xxhash.xxh3_64_intdigest(text))
            os.pwrite(fd, text + footer, nbytes)
            os.rename(part, path)
        except BaseException:
            os.unlink(part)
            raise
        return True
    finally:
        os.close(fd)


def _fill(
    memory: mmap.mmap, entries: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> int:
    """Copy the tensors to their places, and return the hash of all."""
    buffer = torch.frombuffer(memory, dtype=torch.uint8)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor_at([buffer], entries[name]).copy_(tensor)
    digest = xxhash.xxh3_64_intdigest(buffer.numpy().data)
    del buffer  # the mapping cannot be closed while it is lent out
    return digest


def read(path: Path) -> Snapshot | None:
    """The snapshot in the file if every byte of it is as written; None otherwise, with a warning.

    No file is None without one. Never raises for what the file holds: there are checkpoints.
    """
    try:
        with path.open("rb") as file:
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


def _holds(path: Path, key: tuple[str, int, int]) -> bool:
    """Is the state of this run id, generation and step in the file already?"""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, struct.error):
        with path.open("rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with memory:
            head, _ = _description(memory)
            return key == (head["run_id"], head["generation"], head["meta"]["step"])
    return False


def _description(memory: mmap.mmap) -> tuple[dict[str, Any], int]:
    """The JSON and the hash that the tensors should have; ValueError for what is torn."""
    magic, text_bytes, digest, text_digest = _FOOTER.unpack(memory[-_FOOTER.size :])
    end = len(memory) - _FOOTER.size
    if magic != _MAGIC or text_bytes > end:
        raise ValueError("it has no footer")
    text = memory[end - text_bytes : end]
    if xxhash.xxh3_64_intdigest(text) != text_digest:
        raise ValueError("its description does not have its hash")
    head = json.loads(text)
    if head["nbytes"] != end - text_bytes:
        raise ValueError(f"it should hold {head['nbytes']} bytes")
    return head, digest


def _parse(memory: mmap.mmap) -> Snapshot:
    head, digest = _description(memory)
    nbytes = head["nbytes"]
    buffer = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
    data = buffer.numpy().data
    if xxhash.xxh3_64_intdigest(data) != digest:
        raise ValueError("its tensors do not have their hash")
    tensors = {name: tensor_at([buffer], entry) for name, entry in head["tensors"].items()}
    own = {name: head[name] for name in ("run_id", "generation", "meta", "lines", "fault")}
    return Snapshot(**own, tensors=tensors, digest=digest, layout=head["tensors"], data=data)


def remove(path: Path) -> None:
    """Remove the snapshot, and what a killed rank has left unfinished."""
    for file in (path, path.with_name(f"{path.name}.part")):
        with contextlib.suppress(OSError):
            os.unlink(file)
