"""A real run with a kill, and its page."""

import os

import pytest
from support.forked import ranks, train
from support.report_pages import draw, write
from support.toy import SMALL

STEPS = 12
# Rank 1 of two is killed before its seventh step.
KILLED = """
import itertools, os, signal, sys
from gptddp import train
from gptddp.training import life
agree, calls = life.agree, itertools.count(1)
def killed(*args):
    if next(calls) == 7 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return agree(*args)
life.agree = killed
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.fixture(scope="session")
def killed(corpus, tmp_path_factory):
    """A run of two ranks that lost one of them, and was finished by two."""
    folder = tmp_path_factory.mktemp("killed")
    flags = [*SMALL, "--data", str(corpus), "--run-dir", str(folder / "run")]
    flags += ["--steps", str(STEPS), "--eval-every", "4", "--keep", "9"]
    survivor, victim = ranks(2, *flags, code=KILLED, env=os.environ)
    assert victim.wait(120) == -9
    assert survivor.wait(120) == 1, survivor.stderr.read()
    train(2, *flags)
    return folder / "run"


@pytest.fixture(scope="session")
def page(killed, tmp_path_factory):
    """The page of that run."""
    return draw(killed, out=tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture
def written(tmp_path):
    """A run of three lives, two of which were lost."""
    return write(tmp_path / "run", 60, lives=3)
