"""A job's own code: the files of a folder, read, checked and packed on this machine.

In a git repository these are the files that git tracks or would add; without git, all Python files.
Hidden files are never included: no module is hidden, and `.env` or `.netrc` hold secrets.
"""

import os
import re
import stat
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gptddp.errors import ConfigError
from gptddp.files import exists
from gptddp.launch import bundle
from gptddp.launch.bundle import File

MOST_IN_A_CONFIG_MAP = 700 << 10  # bytes of the archive: a third more in JSON, and 1 MiB at most
MOST_CONFIG_MAPS = 12  # etcd stores them, and is not made for more data
_LESS = (
    "let git ignore files that are no code, such as data and models, or name a smaller folder; for "
    "large libraries build an image"
)
_LIST = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
_PLACE = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")  # set in a hook: name another repository


@dataclass(frozen=True)
class Code:
    """The files of a folder that replace the image's; `where`: the option that names the folder.

    The files are read on first use, which may raise ConfigError: `prepare` does not use them, even
    if the job's file names them.
    """

    where: str
    folder: Path

    @cached_property
    def files(self) -> bundle.Files:
        try:
            return _read(self.folder)
        except OSError as error:
            wrong = f"{error.filename} cannot be read: {error.strerror}"
            text = f"{self.where}: {wrong}; {self.folder} must be a folder of packages"
            raise ConfigError(text) from None
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from None

    @cached_property
    def sha256(self) -> str:
        return bundle.sha256(self.files)

    @cached_property
    def archive(self) -> bytes:
        packed, most = bundle.pack(self.files), MOST_CONFIG_MAPS * MOST_IN_A_CONFIG_MAP
        if len(packed) > most:
            raise ConfigError(
                f"{self.where}: {self.folder} has {len(packed) >> 10} KiB, packed, and at most "
                f"{most >> 10} are allowed: {_LESS}"
            )
        return packed

    @property
    def parts(self) -> list[bytes]:
        """The archive in pieces, one per ConfigMap."""
        size = MOST_IN_A_CONFIG_MAP
        return [self.archive[at : at + size] for at in range(0, len(self.archive), size)]

    def __str__(self) -> str:
        many = f"{len(self.files)} file{'s' * (len(self.files) > 1)}"
        return f"own code {self.sha256[:12]}: {many} of {self.folder}, {len(self.archive)} bytes"


def _read(folder: Path) -> bundle.Files:
    """The files of a folder. Raises OSError, and ConfigError for code that no pod could run."""
    listed = _of_git(folder.resolve())
    found = _visible_python(folder) if listed is None else listed
    paths = sorted(path for path in set(found) if not path.startswith(".") and "/." not in path)
    _check_names(folder, paths)
    files: dict[str, File] = {}
    remaining = bundle.MOST_BYTES
    for path in paths:
        files[path] = file = _file(folder, path, remaining)
        if (remaining := remaining - len(file.data)) < 0:
            most = f"{bundle.MOST_BYTES >> 20} MiB"
            raise ConfigError(f"{folder} has more than {most}, up to {path}: {_LESS}")
    for path in paths:
        if path.endswith(".py"):
            _compile(path, files[path].data)
    return files


def _of_git(folder: Path) -> list[str] | None:
    """The existing files that git lists; None without a repository or without git.

    A submodule, or a repository inside this one, is one entry of the list; its own list is added.
    Raises ConfigError with git's message if git fails, as for another user's files.
    """
    import subprocess

    if not any(exists(at / ".git") for at in (folder, *folder.parents)):
        return None
    environment = {name: value for name, value in os.environ.items() if name not in _PLACE}
    try:
        done = subprocess.run(_LIST, cwd=folder, env=environment, capture_output=True)
    except FileNotFoundError:
        return None
    if done.returncode:
        words = " ".join(os.fsdecode(done.stderr).split())
        raise ConfigError(f"git does not list the files of {folder}: {words}")
    found: list[str] = []
    for path in filter(None, os.fsdecode(done.stdout).split("\0")):
        if not os.path.lexists(at := folder / path):
            continue
        if not stat.S_ISDIR(os.lstat(at).st_mode):
            found.append(path)
        elif exists(at / ".git"):
            found += [f"{path.rstrip('/')}/{it}" for it in _of_git(at) or []]
    return found


def _visible_python(folder: Path) -> Iterator[str]:
    def fail(error: OSError) -> None:
        raise error

    for at, folders, names in os.walk(folder, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if name.endswith(".py"):
                yield os.path.relpath(os.path.join(at, name), folder)


def _check_names(folder: Path, paths: list[str]) -> None:
    """Raise ConfigError if Python would not find the files, or if they hide its own modules."""
    parts = folder.resolve().parts
    below = parts[parts.index("gptddp") :] if "gptddp" in parts else ()
    of_ours = below and Path(__file__).parents[3].joinpath(*below).is_dir()
    has_package = any(path.startswith("gptddp/") for path in paths)
    if "__init__.py" in paths or (of_ours and not has_package):
        raise ConfigError(
            f"{folder} is a package itself, or a part of one: name the folder that contains the "
            f"package {(*below, parts[-1])[0]}/"
        )
    if not any(path.endswith(".py") for path in paths):
        raise ConfigError(
            f"{folder} has no Python file, or git ignores all of them: it must contain packages, "
            "such as gptddp/model/gpt.py in place of ours"
        )
    for path in paths:
        module = re.fullmatch(r"([^/.]+)(/__init__\.py|\.py|\.([^/]+\.)?so)", path)
        hidden = module and path != "gptddp/__init__.py" and module[1]
        if hidden in (*sys.stdlib_module_names, "gptddp"):
            raise ConfigError(
                f"{path} would replace the module {hidden} in every program: rename it"
            )


def _file(folder: Path, path: str, most: int) -> File:
    """Read one file, at most `most` + 1 bytes."""
    if not path.isprintable():  # also true of names that are not UTF-8
        raise ConfigError(f"the name {path!r} is not UTF-8, or not printable: rename the file")
    target = Path(os.path.realpath(folder / path))  # `resolve` fails on a link to itself
    if not (exists(target, stat.S_ISREG) and target.is_relative_to(folder.resolve())):
        raise ConfigError(
            f"{path} is no plain file in the folder, so the pods would not have it: put the file "
            "there, or remove the entry"
        )
    with open(target, "rb") as file:
        return File(file.read(most + 1), bool(os.fstat(file.fileno()).st_mode & 0o100))


def _compile(path: str, source: bytes) -> None:
    """Raise ConfigError for a file that an interpreter of this version cannot load."""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # zero bytes; nesting
        version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        raise ConfigError(
            f"{path}: {error} ({version}): the pods could not load it; fix or remove it"
        ) from None
