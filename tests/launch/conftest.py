"""Fixtures of the tests of late saves."""

import time

import pytest
from support.late_saves import Saver, overdue
from support.trainer_patches import lose_a_peer

from gptddp.checkpoint import store
from gptddp.checkpoint.writer import Writer
from gptddp.flags import from_args
from gptddp.launch.rescue import save_late
from gptddp.training import life


@pytest.fixture
def pod(tmp_path, monkeypatch):
    """The folder in which a worker and its launcher meet."""
    folder = tmp_path / "pod"
    folder.mkdir()
    monkeypatch.setenv("GPTDDP_VERDICT", str(folder / "verdict.json"))
    return folder


@pytest.fixture
def left(run, pod, tmp_path):
    """A life has lost a peer after step 3, and rank 0 with the last line of the log."""
    lose_a_peer(run, "--steps", "6")
    log = tmp_path / "run/log.1.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:2]))
    return tmp_path / "run"


@pytest.fixture
def save(left, pod, tmp_path):
    """Save what is left, as the launcher's process does; the names of the run's checkpoints."""

    def begin():
        save_late(from_args(["--run-dir", str(left)]), tmp_path / "memory", pod)
        return store.names(left)

    return begin


@pytest.fixture
def own(monkeypatch):
    """The steps that lives begin to save by themselves."""
    steps, submit = [], Writer.submit

    def noting(writer, step, *args):
        steps.append(step)
        return submit(writer, step, *args)

    monkeypatch.setattr(Writer, "submit", noting)
    return steps


@pytest.fixture
def saver(left, pod, tmp_path, monkeypatch):
    """Beside a life whose steps are long enough for both to be seen."""
    overdue(left)
    saver, agree = Saver(pod, tmp_path / "memory", left), life.agree

    def slowly(*args):
        saver.ends.set()
        time.sleep(0.05)
        return agree(*args)

    monkeypatch.setattr(life, "agree", slowly)
    saver.start()
    assert saver.began.wait(30)
    return saver
