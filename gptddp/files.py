"""Files that are whole or absent: fsync, write then rename, locks, JSON; standard library only."""

import contextlib
import errno
import fcntl
import json
import logging
import os
import stat
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

_FIXES = {
    errno.ENOSPC: "free space on the volume, or lower --keep",
    errno.EDQUOT: "raise the quota, or lower --keep",
    errno.EROFS: "mount the volume writable",
    errno.EACCES: "let this user read and write there",
    errno.EISDIR: "move away the directory that is in a file's place",
    errno.ENOTDIR: "move away the file that is in a directory's place",
    errno.EEXIST: "move away the file that is in a directory's place",
    errno.ELOOP: "move away the symbolic link that is in a file's place",
}
TRANSIENT = (  # errors of a volume that may come back
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT),  # a disk's, or NFS's
    # SMB's, and those of FUSE, Lustre and Ceph: the server or its connection is gone
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNABORTED),
)
# errors that a retry does not mend: another thing is in a file's place, or may not be read
MISPLACED = (errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.ELOOP)
FULL = (errno.ENOSPC, errno.EDQUOT)
RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # pauses before a volume is asked again
_MOMENT_S = (0.001, 0.002, 0.004)  # pauses before a lock is asked for again
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def may_pass(error: BaseException) -> bool:
    """Can the error pass: a volume that may come back, or an error that is marked `transient`?"""
    known = isinstance(error, OSError) and error.errno in TRANSIENT
    return known or bool(getattr(error, "transient", False))


def patiently(look: Callable[[], _Result]) -> _Result:
    """Return what `look` returns; retry for up to half a minute while the volume fails.

    Each failure is logged with its file, error and the time of the next try. Raises the last error
    after the last try, and any other error at once. `look` must be repeatable.
    """
    for pause_s in RETRY_S:
        try:
            return look()
        except Exception as error:
            if not may_pass(error):
                raise
            log.warning("%s: the next try in %g s", error, pause_s)
            time.sleep(pause_s)
    return look()


def explain(error: OSError) -> str:
    """The error in one line, with the fix if it is known."""
    fix = _FIXES.get(error.errno or 0)
    return f"{error}: {fix}" if fix else str(error)


def names_in(directory: str | Path) -> list[str]:
    """The names in a directory; none if it does not exist. Raises OSError."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def exists(path: str | Path, kind: Callable[[int], bool] = bool) -> bool:
    """Is there such a file, of a kind such as `stat.S_ISDIR`? Links are followed.

    Raises OSError if the volume does not answer. `os.path`, and from Python 3.14 on `Path.exists`,
    `is_dir` and `is_file`, return False then: an unreachable file would count as lost.
    """
    try:
        return kind(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def fsync(path: str | Path) -> None:
    """Make a file's content durable, or the names in a directory, for example after a rename."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:  # some FUSE file systems cannot fsync a directory
        if error.errno != errno.EINVAL or not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents, and make its name durable.

    Raises OSError.
    """
    if not exists(path.parent, stat.S_ISDIR):
        make_folder(path.parent)
    path.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):  # the parent may be writable but not readable
        fsync(path.parent)


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte: one `write` may take only a part, on a nearly full disk for instance."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except OSError as error:
            if error.errno != errno.EINVAL or not bypass_cache(fd, False):
                raise


def bypass_cache(fd: int, bypass: bool = True) -> bool:
    """Switch O_DIRECT on or off for a descriptor; True if that changed it.

    With it, writes go to the device without a copy in the page cache. A file system without
    O_DIRECT ignores it. Bytes that are not aligned to the file system's blocks give EINVAL;
    `write_all` then uses the cache.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    wanted = flags | _DIRECT if bypass else flags & ~_DIRECT
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, wanted)
    return wanted != flags


def write_new(path: str | Path, data: bytes) -> None:
    """Write a file that does not exist yet, and fsync it; the caller fsyncs the directory."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)  # NFS may report a failed write only here


def write_atomic(path: str | Path, data: bytes) -> None:
    """Replace a file's content: a reader sees the old or the new content, also after a crash.

    Raises OSError; then the old content is in place, and the temporary file is removed.
    """
    path = Path(path)
    try:
        _write_and_replace(path, data)
    except FileNotFoundError:
        # A process that cleans the folder may have taken the file for one of a killed writer.
        _write_and_replace(path, data)
    fsync(path.parent)


def _write_and_replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        write_new(temporary, data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def is_inside(name: object) -> bool:
    """Is this a relative path that stays inside its folder?

    A manifest must not make us read files elsewhere, by `..` or an absolute path.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    return not os.path.isabs(name) and ".." not in Path(name).parts and Path(name).parts != ()


def lock(path: str | Path) -> int:
    """Create a file if needed and lock it (flock); return its descriptor, which unlocks on close.

    The holder may remove the file before it unlocks. The kernel unlocks it when the process dies.
    On a file system without locks the file stays unlocked. A symbolic link is not followed. Raises
    BlockingIOError if another process holds the lock, OSError if the file cannot be made.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            lock_now(fd)
        except BlockingIOError:
            os.close(fd)
            raise
        except OSError:  # no locks here: the user must run only one process
            return fd
        try:
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                return fd
        except FileNotFoundError:
            pass
        except OSError:
            os.close(fd)  # else it would stay locked
            raise
        os.close(fd)  # its last holder has just removed this file: lock the new one


def lock_now(fd: int) -> None:
    """Lock an open file (flock). Raises BlockingIOError if another process holds the lock.

    It retries for some milliseconds, as `is_locked` holds the lock for a moment. Any other OSError:
    the file system has no locks.
    """
    for pause_s in _MOMENT_S:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(pause_s)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(path: Path) -> bool:
    """Does a living process hold a lock (flock) on the file?"""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # it is gone
        return False
    return False


def write_json_atomic(path: str | Path, obj: Any) -> None:
    """Replace a file's content by an object as indented JSON; see `write_atomic`."""
    write_atomic(path, (json.dumps(obj, indent=2) + "\n").encode())


def parse_json(text: bytes | str) -> Any:
    """Parse JSON. Raises ValueError if it is not JSON, or is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: str | Path) -> Any | None:
    """The content of a JSON file; None if the file does not exist.

    Raises ValueError, naming the file, if it is not JSON or is null, which no file of ours is;
    OSError if it cannot be read.
    """
    try:
        value = parse_json(Path(path).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:  # bad UTF-8 too
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if value is None:
        raise ValueError(f"{path} contains only null")
    return value
