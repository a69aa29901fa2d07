"""Lays own code over the image's package, and starts a program on both.

    python -m gptddp.launch --code /code/<hash>.tar.gz [trainer flags]
    python -m gptddp.launch.overlay --code /code/<hash>.tar.gz gptddp sample RUN

The archive is unpacked into a folder that goes first in PYTHONPATH. If it has a package gptddp, the
package is completed with links to the image's files, so that one changed module needs no copy of
the others. Then the interpreter starts again: so launcher, fork server and workers all see the same
files, and the package's own `__init__.py` and launcher can be changed too.

The hash in the archive's name is in the job's manifest: a user with write access to the archive but
not to the job can keep the pods from starting, but cannot make them run other code.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from gptddp.distributed.environment import CODE
from gptddp.errors import ConfigError, GptddpError
from gptddp.files import explain, may_pass, names_in, patiently
from gptddp.launch import bundle
from gptddp.launch.bundle import SUFFIX

_PACKAGE, _COMPILED = "gptddp", "__pycache__"
_AGAIN = "delete the job and submit it again"


def lay(archive: Path, image: Path) -> Path:
    """A new folder with the archive's files, and links to the rest of the package in `image`.

    Raises ConfigError for an archive that does not match its name, OSError.
    """
    wanted = archive.name.removesuffix(SUFFIX)
    try:
        data = patiently(lambda: bundle.read(archive))
    except OSError as error:
        if may_pass(error):
            raise
        raise ConfigError(f"the job's code cannot be read: {explain(error)}; {_AGAIN}") from None
    try:
        files = bundle.unpack(data)
    except ValueError as error:
        raise ConfigError(f"the job's code in {archive} is damaged: {error}; {_AGAIN}") from None
    if (found := bundle.sha256(files)) != wanted:
        raise ConfigError(
            f"the code in {archive} is not what the job was submitted with: its hash is {found}. "
            f"It was changed; {_AGAIN}"
        )
    root = Path(tempfile.mkdtemp(prefix="gptddp-code-"))
    for path, file in files.items():
        place = root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(file.data)
        if file.executable:
            place.chmod(0o755)
    if (root / _PACKAGE).is_dir():
        _fill_up(root / _PACKAGE, image / _PACKAGE)
    return root


def _fill_up(own: Path, image: Path) -> None:
    """Link the missing files of a folder to the image's: a whole folder if nothing in it changed.

    A module replaces a folder of the image with its name. The image's compiled modules are linked
    too, except those of changed modules: Python looks for them beside the module.
    """
    for it in os.scandir(image):
        place = own / it.name
        if it.name == _COMPILED:
            continue
        if it.is_dir() and place.is_dir():
            _fill_up(place, image / it.name)
        elif not (place.exists() or (it.is_dir() and (own / f"{it.name}.py").exists())):
            place.symlink_to(it.path)
    (own / _COMPILED).mkdir(exist_ok=True)
    for name in names_in(image / _COMPILED):
        if (own / f"{name.partition('.')[0]}.py").is_symlink():
            (own / _COMPILED / name).symlink_to(image / _COMPILED / name)


def start(archive: Path, command: list[str]) -> NoReturn:
    """Replace this process by the command, with the archive's code. Does not return."""
    import gptddp

    root = lay(archive.absolute(), Path(gptddp.__file__).parents[1])
    os.environ[CODE] = archive.name.removesuffix(SUFFIX)
    paths = [str(root), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    os.execvp(command[0], command)


def main(args: Sequence[str], program: Sequence[str] = ()) -> None:
    """Start a program on the archive at the begin of its arguments; return if there is no archive.

    An error prints its reason and ends the process: with code 2, which fails the job, or, if it may
    pass, with a code after which the pod is replaced.
    """
    archive, rest = bundle.split(args)
    if archive is None:
        return
    try:
        start(archive, [*program, *rest])
    except GptddpError as error:
        print(f"gptddp.launch: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except OSError as error:
        from gptddp.launch.launcher import UNEXPECTED

        print(f"gptddp.launch: {explain(error)}", file=sys.stderr, flush=True)
        sys.exit(UNEXPECTED)


if __name__ == "__main__":
    main(sys.argv[1:])
