"""Faults inside the trainer without a hook in it: code that is run in gptddp.train."""

import itertools
import os
from pathlib import Path

import pytest
from support.paths import ROOT

from gptddp.errors import LifeLost
from gptddp.training import life

# Names for the code of a test, beside those of gptddp.train.
HELPERS = """
import os, signal, time
from pathlib import Path
HERE = Path({here!r})
def times(what, most):
    "Is this one of the first times?"
    for i in range(most):
        try:
            os.close(os.open(HERE / f"{{what}}.{{i}}", os.O_CREAT | os.O_EXCL))
            return True
        except FileExistsError:
            pass
    return False
def gate(what):
    "Say that the process is here; wait while the test has closed the gate."
    (HERE / f"{{what}}.reached").write_text(str(os.getpid()))
    while (HERE / f"{{what}}.closed").exists():
        time.sleep(0.01)
"""
SITE = """
import importlib.util, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name != "gptddp.train":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            exec({code!r}, vars(module))
        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


def patched(folder: Path, code: str) -> dict[str, str]:
    """The environment in which `code` is run in gptddp.train, in every process that imports it."""
    folder.mkdir()
    code = HELPERS.format(here=str(folder)) + code
    (folder / "sitecustomize.py").write_text(SITE.format(code=code))
    path = filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH")])
    return {"PYTHONPATH": os.pathsep.join(path)}


def patch_here(folder: Path, code: str) -> str:
    """Code for one process that has imported gptddp.train: it runs `code` in that module."""
    folder.mkdir()
    code = HELPERS.format(here=str(folder)) + code
    return f"from gptddp import train\nexec({code!r}, vars(train))\n"


def lose_a_peer(run, *flags: str, at: int = 4) -> None:
    """A life in this process whose collective fails at its n-th step, as when a peer is gone."""
    agree, calls = life.agree, itertools.count(1)

    def failing(*args):
        if next(calls) == at:
            raise RuntimeError("gloo: Connection closed by peer")
        return agree(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(life, "agree", failing)
        assert run(*flags) == LifeLost.exit_code
