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
TRANSIENT = (  # of a volume that may come back
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT),  # a disk's, or NFS's
    # SMB's, and those of FUSE, Lustre and Ceph: the server or its connection is gone
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENOTCONN, errno.ESHUTDOWN, errno.ECONNABORTED),
)
# trouble that another try does not mend: what is in a file's place, or may not be read
MISPLACED = (errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.ELOOP)
FULL = (errno.ENOSPC, errno.EDQUOT)
RETRY_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)  # pauses before a volume is asked again
_MOMENT_S = (0.001, 0.002, 0.004)  # pauses before a lock is asked for again
_DIRECT = getattr(os, "O_DIRECT", 0)  # Linux

log = logging.getLogger(__name__)

_Result = TypeVar("_Result")


def may_pass(error: BaseException) -> bool:
    """Is it trouble of a volume that may come back? Also of an error that says so by itself."""
    known = isinstance(error, OSError) and error.errno in TRANSIENT
    return known or bool(getattr(error, "transient", False))


def patiently(look: Callable[[], _Result]) -> _Result:
    """What `look` returns, however the volume fails for a while: half a minute at the most.

    Each failure is a line of the log: which file, which error, when it is tried again. Raises the
    last error after the last attempt, and any other error at once. `look` must be repeatable.
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
    """The error in one line with, where we know it, the fix."""
    fix = _FIXES.get(error.errno or 0)
    return f"{error}: {fix}" if fix else str(error)


def names_in(directory: str | Path) -> list[str]:
    """The names in a directory; none where there is no such directory. Raises OSError."""
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []


def exists(path: str | Path, kind: Callable[[int], bool] = bool) -> bool:
    """Is there such a file, of a kind such as `stat.S_ISDIR`? Links are followed.

    Raises OSError where the volume cannot say. `Path.exists`, `is_dir` and `is_file` take that for
    a no from Python 3.14 on, and `os.path` always has: what cannot be seen would count as lost.
    """
    try:
        return kind(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def fsync(path: str | Path) -> None:
    """Make a file's content durable, or the names in a directory, such as a rename's new one."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:  # some FUSE file systems cannot fsync a directory
        if error.errno != errno.EINVAL or not stat.S_ISDIR(os.fstat(fd).st_mode):
            raise
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, unless they are there, and its name durable.

    Raises OSError.
    """
    if not exists(path.parent, stat.S_ISDIR):
        make_folder(path.parent)
    path.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):  # a folder that may be written and not read
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
    """Have writes go from memory to the device (O_DIRECT), or not; True if that is a change.

    It saves the copy to the page cache. A file system without O_DIRECT goes on as before. Bytes
    that are not aligned to the file system's blocks give EINVAL; `write_all` then goes on with the
    cache.
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
    """Replace a file's content: a reader sees the old or the new, after a crash too.

    Raises OSError, with the old content in place and nothing left beside it.
    """
    path = Path(path)
    try:
        _write_and_replace(path, data)
    except FileNotFoundError:
        # Who tidies up the folder may have taken the unfinished file for that of a killed writer.
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
    """Is this a relative path, as a manifest names a file of its own folder, that stays in there?

    Nobody may have a file read that lies elsewhere by a `..` or an absolute path in a manifest.
    """
    if not isinstance(name, str) or not name or "\0" in name:
        return False
    return not os.path.isabs(name) and ".." not in Path(name).parts and Path(name).parts != ()


def lock(path: str | Path) -> int:
    """Lock a file (flock), made if need be; returns the descriptor, and closing it unlocks.

    Its holder may remove the file before it unlocks. The kernel unlocks it when the process dies.
    On a file system without locks the descriptor is of an unlocked file. A symbolic link is not
    followed. Raises BlockingIOError where another process holds the lock, OSError where the file
    cannot be made.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            lock_now(fd)
        except BlockingIOError:
            os.close(fd)
            raise
        except OSError:  # no locks here: the user takes care that only one process is at work
            return fd
        try:
            if os.path.samestat(os.stat(path), os.fstat(fd)):
                return fd
        except FileNotFoundError:
            pass
        except OSError:
            os.close(fd)  # nobody would unlock it
            raise
        os.close(fd)  # its last holder has just removed this file: lock the new one


def lock_now(fd: int) -> None:
    """Lock an open file (flock). Raises BlockingIOError where another process has it locked.

    Who asks `is_locked` has it for a moment, which is waited for. Other errors: no locks there.
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
    """The value that it says. Raises ValueError for all that is not JSON, or nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: str | Path) -> Any | None:
    """The content of a JSON file; None where there is no such file.

    Raises ValueError, naming the file, where it is not JSON, or null, which none of our files is;
    OSError where it cannot be read.
    """
    try:
        value = parse_json(Path(path).read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:  # bad UTF-8 too
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if value is None:
        raise ValueError(f"{path} has nothing but null")
    return value
