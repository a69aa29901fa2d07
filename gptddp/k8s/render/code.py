"""Own code of a job: the Python files of a folder, read, checked and packed on this machine."""

import itertools
import os
import stat
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from gptddp.errors import ConfigError
from gptddp.files import exists, explain
from gptddp.k8s.render.ignore import FILE, Ignore
from gptddp.launch import bundle
from gptddp.launch.bundle import File

MOST_IN_A_CONFIG_MAP = 700 << 10  # bytes of the archive; a third more in JSON, and 1 MiB is the end
MOST_CONFIG_MAPS = 12  # the cluster's own database holds them: it is no place for more
MOST_FILES = 10_000
_LESS = (
    f"leave out what is no code, such as data and models, by lines in {FILE}; for large libraries "
    "build an image"
)
_PYTHON = f"Python {sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Code:
    """The files of a folder that go before those of the image; `where`: the option that names it.

    They are read at the first look at them, which may raise ConfigError: `prepare` has no use for
    them, though the job's file names them.
    """

    where: str
    folder: Path

    @cached_property
    def files(self) -> bundle.Files:
        return read(self.where, self.folder)

    @cached_property
    def sha256(self) -> str:
        return bundle.sha256(self.files)

    @cached_property
    def archive(self) -> bytes:
        packed, most = bundle.pack(self.files), MOST_CONFIG_MAPS * MOST_IN_A_CONFIG_MAP
        if len(packed) > most:
            raise ConfigError(
                f"{self.where}: {self.folder} has {len(packed) >> 10} KiB, packed, and may have "
                f"{most >> 10}: {_LESS}"
            )
        return packed

    @property
    def parts(self) -> list[bytes]:
        """The archive in pieces, each for a ConfigMap."""
        size = MOST_IN_A_CONFIG_MAP
        return [self.archive[at : at + size] for at in range(0, len(self.archive), size)]

    def __str__(self) -> str:
        many = f"{len(self.files)} file{'s' * (len(self.files) > 1)}"
        return f"own code {self.sha256[:12]}: {many} of {self.folder}, {len(self.archive)} bytes"


def read(where: str, folder: Path) -> bundle.Files:
    """The files in a folder, without what its ignore file leaves out; `where`: the option.

    Raises ConfigError for what no pod could run, with the file and the fix.
    """
    try:
        if not exists(folder, stat.S_ISDIR):
            raise ConfigError(
                f"there is no folder {folder}: name the one that holds your packages, such as a "
                "checkout with gptddp/ in it"
            )
        paths = list(itertools.islice(_paths(folder, Ignore.of(folder)), MOST_FILES + 1))
        if len(paths) > MOST_FILES:
            raise ConfigError(f"{folder} has more than {MOST_FILES} files: {_LESS}")
        _check_names(folder, paths)
        files = dict(_read(folder, paths))
        for path in filter(_is_python, paths):
            _compile(path, files[path].data)
        return files
    except OSError as error:
        raise ConfigError(f"{where}: {folder} cannot be read: {explain(error)}") from None
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _is_python(path: str) -> bool:
    return path.endswith(".py")


def _paths(folder: Path, ignore: Ignore, below: str = "") -> Iterator[str]:
    """The files that count, in order, as paths with slashes. Raises ConfigError, OSError."""
    for name in sorted(os.listdir(folder / below)):
        path, found = below + name, folder / below / name
        mode = os.lstat(found).st_mode
        if ignore.leaves_out(path, stat.S_ISDIR(mode)):
            continue
        try:
            path.encode()
        except UnicodeEncodeError:
            raise ConfigError(f"the name {path!r} is not UTF-8: rename the file") from None
        if stat.S_ISDIR(mode):
            yield from _paths(folder, ignore, path + "/")
            continue
        what = _wrong_link(folder, found) if stat.S_ISLNK(mode) else "no plain file"
        if what and not stat.S_ISREG(mode):
            raise ConfigError(
                f"{path} is {what}, which no pod would have: put what it stands for there, or "
                f"leave it out by a line in {folder / FILE}"
            )
        yield path


def _wrong_link(folder: Path, link: Path) -> str | None:
    """What is wrong with a link; None for a plain file of the folder under a second name."""
    target = Path(os.path.realpath(link))  # unlike `resolve`, it ends at a link to itself
    if not target.exists():
        return "a link to nothing"
    if not target.is_relative_to(folder.resolve()):
        return "a link out of the folder"
    return None if target.is_file() else "a link to what is no plain file"


def _check_names(folder: Path, paths: list[str]) -> None:
    """Refuse a folder whose files would not be found, or that hides what Python needs."""
    if "__init__.py" in paths:
        raise ConfigError(
            f"{folder} is a package itself: name the folder that holds it, so that"
            f" {folder.resolve().name}/ is in it"
        )
    inside = _inside_package(folder.resolve())
    if inside and not any(path.startswith("gptddp/") for path in paths):
        raise ConfigError(
            f"{folder} is a part of a package, {inside}: name the folder that holds gptddp/, as "
            "else its modules would take the place of none of ours"
        )
    if not any(map(_is_python, paths)):
        raise ConfigError(
            f"{folder} has no Python file, or {FILE} leaves all out: it is to hold "
            "packages, such as gptddp/model/gpt.py in the place of ours"
        )
    for path in paths:
        name = path.removesuffix("/__init__.py").removesuffix(".py")
        name = name.partition(".")[0] if name.endswith(".so") else name
        if (name in sys.stdlib_module_names and path != name) or (
            name == "gptddp" and path != name and "/" not in path
        ):
            raise ConfigError(
                f"{path} would take the place of {name} in every program: rename it, or "
                f"leave it out by a line in {folder / FILE}"
            )


def _inside_package(folder: Path) -> str | None:
    """`gptddp/model`, for a folder of that name, though it has no `__init__.py`; else None."""
    at = next((it for it in (folder, *folder.parents) if it.name == "gptddp"), None)
    inside = at and folder.relative_to(at.parent)
    return str(inside) if inside and (Path(__file__).parents[3] / inside).is_dir() else None


def _read(folder: Path, paths: list[str]) -> Iterator[tuple[str, File]]:
    """The files. Raises ConfigError where they are too many, OSError."""
    left = bundle.MOST_BYTES
    for path in paths:
        with open(folder / path, "rb") as file:
            data = file.read(left + 1)
            if (left := left - len(data)) < 0:
                most = f"{bundle.MOST_BYTES >> 20} MiB"
                raise ConfigError(f"{folder} has more than {most}, up to {path}: {_LESS}")
            yield path, File(data, bool(os.fstat(file.fileno()).st_mode & 0o100))


def _compile(path: str, source: bytes) -> None:
    """Raise ConfigError for a file that no interpreter of this version would load."""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(source, path, "exec", dont_inherit=True)
    except SyntaxError as error:
        at = f"{path}, line {error.lineno}" if error.lineno else path
        text = f": {error.text.strip()[:80]}" if error.text else ""
        why = f"{error.msg}{text}"
    except (ValueError, RecursionError, MemoryError) as error:  # zero bytes; endless nesting
        at, why = path, str(error)
    else:
        return
    raise ConfigError(
        f"{at}: {why} ({_PYTHON}): the pods could not load it; mend it, or leave it out by "
        f"a line in {FILE}"
    )
