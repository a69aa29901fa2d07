"""The tracker has each step of the log once, with its values, whichever process is killed.

`make test-track` runs these tests, and installs the trackers for them.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from support.forked import fork
from support.launchers import RATE, Training, undisturbed
from support.processes import children, free_port
from support.same_bits import check_same_lines
from support.toy import SMALL
from support.tracked import READERS
from support.waiting import until

from gptddp import train
from gptddp.run.history import history, log_generations, logged

COMMAND = [sys.executable, "-c", "from gptddp.cli import cli; cli()", "track"]
SLOWLY = """
import time
from gptddp.distributed.process import run
from gptddp.training.life import Life
record = Life.record
Life.record = lambda life: (time.sleep(0.05), record(life))
from gptddp.train import main
run(main)
"""

NOTHING_MORE = """
import sys
from gptddp.train import main
from gptddp.track.trackers import TRACKERS
assert main(sys.argv[1:]) == 0
assert not TRACKERS.keys() & {name.partition(".")[0] for name in sys.modules}
"""


def check(tracker, run):
    """The tracker has all steps of the log in order, each once, with its numbers and generation."""
    found, wanted = READERS[tracker](run, run.name), list(logged(run))
    assert [step for step, _ in found] == [line["step"] for _, line in wanted]
    assert wanted, "the run has no steps"
    for (step, values), (generation, line) in zip(found, wanted, strict=True):
        numbers = {name: it for name, it in line.items() if type(it) in (int, float)}
        numbers = {name: it for name, it in numbers.items() if name not in ("step", "since_s")}
        when = numbers.pop("time")
        if tracker == "wandb":
            assert (values.pop("_timestamp"), values.pop("_step")) == (when, step)
            del values["_runtime"]
        if tracker == "tensorboard":
            numbers = {name: float(np.float32(it)) for name, it in numbers.items()}
        assert values == numbers | {"generation": generation}


def by_hand(tracker, run):
    ended = subprocess.run([*COMMAND, str(run), "--to", tracker], capture_output=True, text=True)
    first, said = ended.stderr.split("\n", 1)
    assert first == f"sending the steps of {run} to {tracker}"
    return ended.returncode, said


def test_each_step_is_tracked_once_over_kills(tracker, corpus, tmp_path, forked):
    """The trainer, its feeding process, or both are killed by SIGKILL as soon as steps exist. Steps
    that are done again have another rate: the tracker has the rate of the log."""
    run = tmp_path / "run"
    flags = [*SMALL, "--data", str(corpus), "--run-dir", str(run), "--track", tracker]
    flags += ["--checkpoint-every", "0.5", "--eval-every", "7"]
    seen = 0

    def there():
        return len(READERS[tracker](run, run.name)) > seen

    for life, victims in enumerate(("both", "trainer", "feeding", "both")):
        process = forked(SLOWLY, *flags, "--steps", str(10**6 + life), env=dict(os.environ))
        until(there, f"steps of life {life}", poll_s=0.2, why=process.stderr.read)
        feeding = until(lambda pid=process.pid: next(filter(feeds, children(pid)), None))
        if victims != "trainer":
            os.kill(feeding, signal.SIGKILL)
        if victims == "feeding":  # the trainer continues without it
            more = len(list(history(run))) + 20
            until(lambda more=more: len(list(history(run))) > more)
        process.kill()
        process.wait(30)
        seen = len(READERS[tracker](run, run.name))
    steps = len(list(history(run))) + 20
    process = forked(SLOWLY, *flags, "--steps", str(steps), env=dict(os.environ))
    assert process.wait(120) == 0, process.stderr.read()
    assert len(log_generations(run)) == 5
    check(tracker, run)
    assert by_hand(tracker, run) == (0, f"{tracker} has the steps up to {steps}\n")
    check(tracker, run)


def feeds(pid):
    """Is this the process that feeds a tracker, not the saver?"""
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"--follow" in file.read()


def test_a_new_rank_0_takes_the_tracker_over(tracker, corpus, tmp_path):
    """Rank 0's pod is killed twice while the others continue: no step is missing or doubled."""
    flags = ("--steps", "400", "--checkpoint-every", "0.5", "--track", tracker)
    job = Training(tmp_path / "job", corpus, 3, 57, 1, *flags)
    with contextlib.closing(job):
        job.start(0, 1, 2)
        for pod in (0, 1):
            seen = len(READERS[tracker](job.folder, "job"))
            until(lambda seen=seen: len(READERS[tracker](job.folder, "job")) > seen, "steps")
            job.pods[pod].kill()
            job.goes_on(2)
            job.whole()
        lines = job.finish()
    check_same_lines(lines, undisturbed(tmp_path / "alone", corpus, 1, 400))
    check(tracker, job.folder)
    assert len(log_generations(job.folder)) == 3


@pytest.fixture(params=["refuses", "hangs"])
def away(request, monkeypatch):
    """An address without a server, or a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listens:
        port = listens.getsockname()[1] if request.param == "hangs" else free_port()
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", "5")
        monkeypatch.setenv("TRACKIO_SERVER_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("TRACKIO_WRITE_TOKEN", "token")
        yield


@pytest.mark.parametrize("tracker", ["wandb", "trackio"])
def test_an_unavailable_tracker_gets_all_steps_later(
    tracker, away, corpus, tmp_path, monkeypatch, request
):
    """The run ends with the same bits, and warns once, or once more at its end. `gptddp track`
    fails, but sends all steps once the tracker is available."""
    run = tmp_path / "run"
    flags = [*SMALL, *RATE, "--data", str(corpus), "--run-dir", str(run), "--track", tracker]
    flags += ["--checkpoint-every", "0.5", "--eval-every", "1000000", "--steps", "300"]
    process = fork(SLOWLY, *flags, env=dict(os.environ))
    assert process.wait(180) == 0, process.stderr.read()
    assert 1 <= process.stderr.read().count(f"{tracker} lacks steps (") <= 2
    check_same_lines(list(history(run)), undisturbed(tmp_path / "alone", corpus, 1, 300))
    code, said = by_hand(tracker, run)
    assert code == 1 and said.startswith(f"Error: {tracker} lacks steps ("), said
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("TRACKIO_SERVER_URL")
    if tracker == "trackio":
        request.getfixturevalue("server")()
    assert by_hand(tracker, run) == (0, f"{tracker} has the steps up to 300\n")
    check(tracker, run)


def test_tensorboard_has_each_step_once_whatever_the_names_of_its_files(
    corpus, tmp_path, train_here
):
    """Each step is there once if the folder has brackets, or a file's clock was years ahead."""
    run = tmp_path / "a[1]"
    flags = [*SMALL, "--data", str(corpus), "--run-dir", str(run)]
    for steps in ("4", "6", "8"):
        assert train.main([*flags, "--steps", steps]) == 0
        assert by_hand("tensorboard", run) == (0, f"tensorboard has the steps up to {steps}\n")
        if steps == "4":
            (file,) = (run / "tensorboard" / run.name).glob("events.*")
            file.rename(file.with_name("events.out.tfevents.9999999999.there.1.0"))
    found = [step for step, _ in READERS["tensorboard"](run, run.name)]
    assert sorted(found) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_run_without_a_tracker_loads_none(corpus, tmp_path):
    """Without --track no tracker package is imported, and no process is started."""
    flags = [*SMALL, "--data", str(corpus), "--run-dir", str(tmp_path / "run"), "--steps", "2"]
    process = fork(NOTHING_MORE, *flags, env=dict(os.environ))
    assert process.wait(60) == 0, process.stderr.read()
