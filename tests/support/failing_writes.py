"""A volume whose n-th write fails, as Python asks for it: at once, or when it has been done.

Writes are: to open a file for writing, to write to it, to have it on the disk, to close it; and to
make, name, touch and remove files and folders.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_NAMES = ["write", "fsync", "close", "mkdir", "rename", "replace", "link", "unlink", "utime"]
_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Writes:
    """Counts the writes below a folder and fails the one that it is told to."""

    def __init__(self, folder: Path, setattr: Callable[..., None] = setattr) -> None:
        self.folder, self.on, self.code = str(folder), False, 0
        self.at: int | None = None  # the number of the write that fails
        self.done = False  # when it has been done: its answer is lost
        self.seen: list[str] = []  # what was asked for, of which path
        for name in _NAMES:
            setattr(os, name, self._asking(getattr(os, name)))
        setattr(os, "open", self._asking(os.open, writes=lambda flags, *_: bool(flags & _FLAGS)))

    @contextlib.contextmanager
    def failing(self, code: int, at: int | None, done: bool) -> Iterator[None]:
        """Within it that write fails, once; `seen` is what was written."""
        self.code, self.at, self.done, self.seen, self.on = code, at, done, [], True
        try:
            yield
        finally:
            self.on = False

    def _asking(self, real: Any, writes: Callable[..., bool] = lambda *_: True) -> Any:
        def ask(target: Any, *args: Any, **kwargs: Any) -> Any:
            path = self._path(target) if self.on and writes(*args) else ""
            if not path.startswith(self.folder):
                return real(target, *args, **kwargs)
            self.seen.append(f"{real.__name__} {path}")
            due = len(self.seen) - 1 == self.at
            if not due or self.done or real.__name__ == "close":  # a file is closed in any case
                result = real(target, *args, **kwargs)
            if due:
                raise OSError(self.code, os.strerror(self.code), path)
            return result

        return ask

    def _path(self, target: Any) -> str:
        with contextlib.suppress(OSError):
            fd = isinstance(target, int)
            return os.readlink(f"/proc/self/fd/{target}") if fd else os.fspath(target)
        return ""
