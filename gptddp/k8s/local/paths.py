"""Paths of local jobs, as a user types them."""

import os
import shlex
from pathlib import Path

LOCAL_DIR = Path("gptddp-local")  # default of --local-dir


def relative_path(path: str | Path) -> str:
    """A path as the user would type it: relative where it is below the current directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def options_for(local_dir: Path) -> str:
    """The options that select the jobs of this folder on a command line."""
    where = relative_path(local_dir.absolute())
    return " --local" + ("" if where == str(LOCAL_DIR) else f" --local-dir {shlex.quote(where)}")
