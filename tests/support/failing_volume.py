"""A volume on which the n-th read or write by Python fails, or all those of a file or folder."""

import builtins
import contextlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gptddp.data import dataset

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_NAMING = ("rename", "replace", "link", "unlink", "utime")


def answer_as_python_3_14(setattr: Callable[..., None]) -> None:
    """Let pathlib answer False to every error, as `os.path` does, and as it does in Python 3.14."""
    setattr(Path, "exists", lambda path: os.path.exists(path))
    setattr(Path, "is_dir", lambda path: os.path.isdir(path))
    setattr(Path, "is_file", lambda path: os.path.isfile(path))
    setattr(Path, "is_symlink", lambda path: os.path.islink(path))


class Broken:
    """An open file that cannot be read."""

    def __init__(self, file: Any, fail: Callable[[], None]) -> None:
        self.file, self.fail = file, fail

    def __enter__(self) -> "Broken":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return self._read if name.startswith("read") else getattr(self.file, name)

    def __iter__(self) -> Iterator[bytes]:
        self.fail()
        return iter(self.file)

    def _read(self, *_: object) -> None:
        self.fail()


class _Counted:
    """Counts calls on files below the folders, and fails those that a test chooses."""

    def __init__(self, *folders: Path) -> None:
        self.folders = tuple(map(str, folders))
        self.code, self.on = 0, False
        self.at: int | None = None  # the number of the call that fails
        self.path = ""  # all calls on it, and on what is in it, fail
        self.done = False  # a write fails after it is done: its answer is lost
        self.seen: list[str] = []  # the calls, in order

    @contextlib.contextmanager
    def failing(
        self, code: int, at: int | None = None, done: bool = False, path: str = ""
    ) -> Iterator[None]:
        """Within it the chosen calls fail; `seen` has all calls."""
        self.code, self.at, self.done, self.path = code, at, done, path
        self.seen, self.on = [], True
        try:
            yield
        finally:
            self.on = False

    def _due(self, path: str, what: str = "") -> bool:
        """Count a call. Must it fail?"""
        inside = any(f"{path}/".startswith(f"{folder}/") for folder in self.folders)
        if not (self.on and inside):
            return False
        self.seen.append(f"{what} {path}".strip())
        if self.path:
            return f"{path}/".startswith(f"{self.path}/")
        return len(self.seen) - 1 == self.at

    def _fail(self, path: Any) -> None:
        raise OSError(self.code, os.strerror(self.code), str(path))


class Writes(_Counted):
    """The calls: open a file for writing, write, fsync and close it; make, name, touch and remove
    files and folders."""

    def __init__(self, folder: Path, setattr: Callable[..., None] = setattr) -> None:
        super().__init__(folder)
        for name in ("write", "fsync", "close", "mkdir", *_NAMING):
            setattr(os, name, self._asking(getattr(os, name)))
        setattr(os, "open", self._asking(os.open, writes=lambda flags, *_: bool(flags & _WRITES)))

    def _asking(self, real: Any, writes: Callable[..., bool] = lambda *_: True) -> Any:
        def ask(target: Any, *args: Any, **kwargs: Any) -> Any:
            path = self._path(target) if self.on and writes(*args) else ""
            due = self._due(path, real.__name__)
            if not due or self.done or real.__name__ == "close":  # a file is closed in any case
                result = real(target, *args, **kwargs)
            if due:
                self._fail(path)
            return result

        return ask

    def _path(self, target: Any) -> str:
        with contextlib.suppress(OSError):
            fd = isinstance(target, int)
            return os.readlink(f"/proc/self/fd/{target}") if fd else os.fspath(target)
        return ""


class Reads(_Counted):
    """The calls: open a file for reading, read, list a directory, stat a file; and open a parquet
    file, which Arrow does itself."""

    def __init__(self, *folders: Path, setattr: Callable[..., None] = setattr) -> None:
        super().__init__(*folders)
        setattr(builtins, "open", self._opening(builtins.open))
        setattr(io, "open", self._opening(io.open))
        setattr(os, "open", self._asking(os.open, reads=lambda flags, *_: not flags & _WRITES))
        for name in ("listdir", "scandir", "stat", "lstat"):
            setattr(os, name, self._asking(getattr(os, name)))
        setattr(dataset, "open_parquet", self._parquet(dataset.open_parquet))

    def _due(self, target: Any, what: str = "") -> bool:
        return super()._due(str(os.fspath(target)) if isinstance(target, str | os.PathLike) else "")

    def _asking(self, real: Any, reads: Callable[..., bool] = lambda *_: True) -> Any:
        def ask(target: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if reads(*args) and self._due(target):
                self._fail(target)
            return real(target, *args, **kwargs)

        return ask

    def _opening(self, real: Any) -> Any:
        def open_file(target: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if set(mode) & set("wax+"):
                return real(target, mode, *args, **kwargs)
            if self._due(target):
                self._fail(target)
            file = real(target, mode, *args, **kwargs)
            return Broken(file, lambda: self._fail(target)) if self._due(target) else file

        return open_file

    def _parquet(self, real: Any) -> Any:
        @contextlib.contextmanager
        def open_parquet(path: Any, *args: Any) -> Iterator[Any]:
            if self._due(path):
                self._fail(path)
            with real(path, *args) as file:
                yield file

        return open_parquet
