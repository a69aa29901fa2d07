"""A run continues while its disk is full, read-only, broken or slow, or hangs."""

import contextlib
import errno
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.failing_disk import Disk
from support.forked import ended, ranks
from support.paths import SUPPORT
from support.same_bits import check_same_bits
from support.small_disk import small_disk
from support.toy import SMALL
from support.waiting import until

from gptddp import train
from gptddp.run import lines
from gptddp.run.history import history, read_ledger

DISKS = str(SUPPORT / "failing_disk.py")
FLAGS = ("--eval-every", "1000", "--final-lr", "1")  # the rate does not depend on --steps


@pytest.fixture
def check(undisturbed):
    """check(run, steps): the run and its newest checkpoint have the bits of one process on a disk
    that works; returns the events of its checkpoints."""

    def same(run: Path, steps: int) -> list[dict]:
        check_same_bits(run, undisturbed(*FLAGS, "--steps", str(steps)))
        return [event for event in read_ledger(run) if event["event"] == "checkpoint"]

    return same


def settings(corpus: Path, run: Path, steps: int, plan: dict) -> tuple[list[str], dict[str, str]]:
    """The flags and the environment of a trainer on a disk with this plan."""
    flags = [*SMALL, "--data", str(corpus), "--run-dir", str(run), "--steps", str(steps)]
    flags += ["--checkpoint-every", "0.2", *FLAGS]
    return flags, os.environ | {"OMP_NUM_THREADS": "1", "DISK_PLAN": json.dumps(plan)}


@pytest.fixture
def start(corpus, spawn):
    """start(run, steps, plan): a trainer on a disk with this plan."""

    def begin(run: Path, steps: int, plan: dict):
        flags, env = settings(corpus, run, steps, plan)
        command = [sys.executable, DISKS, *flags]
        env |= {"PYTHONPATH": os.pathsep.join(sys.path)}
        return spawn(command, env=env, stderr=subprocess.PIPE, text=True)

    return begin


def finish(process, code: int) -> str:
    """Wait for the end with this exit code; the stderr."""
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    return err


@pytest.fixture
def three(corpus):
    """three(run, steps, plan, code, **env): run three ranks until they exit with `code`; stderr."""

    def run_all(run: Path, steps: int, plan: dict, code: int, **more: str) -> str:
        flags, env = settings(corpus, run, steps, plan)
        script = f"import runpy; runpy.run_path({DISKS!r}, run_name='__main__')"
        return "".join(ended(ranks(3, *flags, code=script, env=env | more), code))

    return run_all


@pytest.fixture
def trained(corpus, tmp_path, monkeypatch, train_here):
    """Train in this process on a disk with a plan: (the disk, the run)."""

    def begin(plan: dict[int, str | None], steps: int) -> tuple[Disk, Path]:
        monkeypatch.setattr(lines, "RETRY_S", 0.02)
        disk, run = Disk(tmp_path / "run", monkeypatch.setattr), tmp_path / "run"
        disk.plan(plan, setattr=monkeypatch.setattr)
        flags = [*SMALL, "--data", str(corpus), "--run-dir", str(run), "--steps", str(steps)]
        assert train.main([*flags, "--checkpoint-every", "0.05", *FLAGS]) == 0
        return disk, run

    return begin


def test_training_continues_through_write_errors(trained, check, caplog):
    """Each error gives one warning and one all-clear, and the metric is 1 between them. Saves fail
    and then work again, and no line is lost."""
    codes = [errno.EROFS, errno.EIO, errno.ESTALE]
    plan = {}
    for n, code in enumerate(codes):
        plan |= {20 + 60 * n: errno.errorcode[code], 28 + 60 * n: None}
    disk, run = trained(plan, 200)
    saves = check(run, 200)
    told = re.findall(r"STORAGE: (.*)", caplog.text)
    assert len(told) == 6 and set(told[1::2]) == {"it works again"}
    for n, code in enumerate(codes):
        assert os.strerror(code) in told[2 * n]
        begin = 20 + 60 * n
        assert dict(disk.seen)[begin - 1] == 0 and dict(disk.seen)[begin + 7] == 1
        assert any(os.strerror(code) in save.get("error", "") for save in saves)
        assert any("name" in save and begin + 8 < save["step"] < begin + 60 for save in saves)


def test_training_continues_while_the_disk_hangs_or_is_slow(trained, check, caplog):
    """The hang ends only because training continues; its begin and its end are reported once. A
    volume of 200 kB/s makes saves rare, and no step waits for one."""
    caplog.set_level("INFO", "gptddp.training.console")
    disk, run = trained({20: "hang", 40: None, 80: "slow", 125: None}, 140)
    saves = check(run, 140)
    assert all("error" not in save for save in saves)
    told = [text for text in re.findall(r"STORAGE: (.*)", caplog.text) if "works" not in text]
    assert re.search(r"\d+ s; training continues", told[0])
    assert dict(disk.seen)[39] == 1 and dict(disk.seen)[75] == 0
    said = dict(re.findall(r"step (\d+)/140 .*  ETA [\d:]+(.*)", caplog.text))
    assert "storage fails" in said["40"] and "storage fails" not in said["10"] + said["70"]
    times = [line["time"] for line in history(run) if 80 < line["step"] <= 125]
    written = [(save["time"] - save["write_s"], save["time"]) for save in saves]
    slow = [(begin, end) for begin, end in written if begin < times[-1] and end > times[0]]
    assert slow and len(slow) < 7
    meanwhile = [at for at in times if any(begin < at < end for begin, end in slow)]
    assert len(meanwhile) > 10  # a save takes two seconds, a step a tenth


def test_the_end_waits_for_the_disk(three, check, tmp_path):
    """The disk of three ranks is full, then hangs, and works again after the last step: exit 0,
    although the wait is longer than a collective may take. The wait is reported once."""
    run = tmp_path / "run"
    plan = {10: "ENOSPC", 20: "hang"}
    err = three(run, 30, plan, 0, DISK_HEAL_S="6")
    assert any("error" in save for save in check(run, 30))
    assert err.count("waiting for the storage") == 1 and err.count("finished after step 30") == 1
    assert err.count("STORAGE: ") == 2 and (run / "finished.json").exists()


def test_a_disk_that_never_recovers_ends_the_run(three, check, tmp_path):
    """The wait has a limit: exit code 1 on all ranks. The next life repeats the steps that are not
    saved, although the disk is still full at its start, and loses no line."""
    run = tmp_path / "run"
    err = three(run, 30, {10: "EROFS"}, 1, DISK_WAIT_S="2")
    assert err.count("the last checkpoint cannot be written") >= 3
    assert "Read-only file system" in err and "mount the volume writable" in err
    assert not (run / "finished.json").exists()
    err = three(run, 60, {0: "ENOSPC", 45: None}, 0)
    assert "the run continues, but its directory cannot be written" in err
    check(run, 60)


def test_sigterm_ends_the_wait_for_the_disk(start, tmp_path):
    """SIGTERM while the run waits for a full disk: 143 at once, and the run is not finished."""
    run = tmp_path / "run"
    process = start(run, 20, {10: "EDQUOT"})
    for line in process.stderr:
        if "waiting for the storage" in line:
            break
    process.send_signal(signal.SIGTERM)
    finish(process, 128 + signal.SIGTERM)
    assert not (run / "finished.json").exists()


def test_a_new_run_on_a_failing_disk_is_refused(start, tmp_path):
    """A new run on a full or read-only disk is refused with the fix."""
    (tmp_path / "run").mkdir()
    for mode, fix in (("ENOSPC", "free space"), ("EROFS", "mount the volume writable")):
        err = finish(start(tmp_path / "run", 5, {0: mode}), 2)
        assert fix in err and "Traceback" not in err


def test_a_full_file_system(start, check, tmp_path):
    """A real one, of 3 MB: a warning, an all-clear when there is room, and no line is lost."""
    with small_disk(tmp_path / "disk", "3m") as disk:
        process = start(disk / "run", 10**6, {})
        until(lambda: list(disk.glob("run/checkpoints/step-*")), "a checkpoint")
        with contextlib.suppress(OSError), open(disk / "ballast", "wb") as ballast:
            while True:
                ballast.write(bytes(4096))
        told = iter(process.stderr)
        assert any("No space left on device" in line for line in told)
        (disk / "ballast").unlink()
        assert any("it works again" in line for line in told)
        process.send_signal(signal.SIGTERM)
        assert "is saved" in finish(process, 143)
        check(disk / "run", max(line["step"] for line in history(disk / "run")))
