"""A volume that fails for a moment, or for good, while a life begins: at every read of a start.

tests/faults/test_starts.py tests a whole training.
"""

import errno
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.failing_volume import Reads
from support.toy import SMALL

from gptddp import files
from gptddp.checkpoint.run_state import why_finished
from gptddp.cli import cli
from gptddp.data.dataset import open_dataset
from gptddp.distributed.connect import World, connect
from gptddp.files import patiently
from gptddp.flags import from_args
from gptddp.run import lines
from gptddp.run.history import read_ledger
from gptddp.run.origin import Origin
from gptddp.training import begin
from gptddp.training.clock import PhaseClock

# of a disk or NFS; of SMB, FUSE, Lustre and Ceph after the loss of their server
CODES = [errno.EIO, errno.EHOSTDOWN, errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Three more tries, at once."""
    monkeypatch.setattr(files, "RETRY_S", (0.0,) * 3)


@pytest.fixture
def reads(corpus, tmp_path, monkeypatch):
    """The reads of the run directory and of the dataset."""
    return Reads(tmp_path / "run", corpus, setattr=monkeypatch.setattr)


@pytest.fixture
def start(run, corpus, reads, tmp_path):
    """start(code, at, path) -> the origin of a life, on a volume that fails so; see Reads.failing.

    The run directory is put back as it was at the first call.
    """
    flags = [*SMALL, "--data", str(corpus), "--run-dir", str(tmp_path / "run"), "--steps", "9"]
    config = from_args(flags)
    with ExitStack() as stack:
        worlds: list[World] = []

        def begun(*fault, **which) -> Origin:
            if not worlds:
                worlds.append(stack.enter_context(connect("cpu")))
            kept = tmp_path / "kept"
            if not kept.exists():
                shutil.copytree(tmp_path / "run", kept)
            shutil.rmtree(tmp_path / "run")
            shutil.copytree(kept, tmp_path / "run")
            with reads.failing(*fault or (0,), **which):
                dataset = patiently(lambda: open_dataset(config.data))
                patiently(dataset.tokenizer)
                origin, _, lease = begin.newest_state(config, dataset, worlds[0], PhaseClock())
            if lease:
                lease.release()
            return origin

        yield begun


def test_a_read_that_fails_once_changes_nothing(run, start, reads, tmp_path):
    """Each single read of a start fails with one of these errors: it is retried, and the life
    continues from the same state of the same run, with the same configuration."""
    assert run("--steps", "3") == 0
    undisturbed = start()
    assert undisturbed.step == 3
    number = len(reads.seen)
    assert number > 20
    for at in range(number):
        assert start(CODES[at % len(CODES)], at=at) == undisturbed, (at, reads.seen[at])
        assert len(reads.seen) > at


def test_a_file_that_stays_unreadable_causes_no_final_error(run, start, reads, tmp_path):
    """Whichever file or directory is unreadable, the life equals the undisturbed one or ends by an
    error that is retried. It never has another identity, begins from scratch, or ends for good."""
    assert run("--steps", "3") == 0
    undisturbed, ended = start(), set()
    paths = sorted({*reads.seen, *(str(Path(path).parent) for path in reads.seen)})
    for i, path in enumerate(paths):
        try:
            assert start(CODES[i % len(CODES)], path=path) == undisturbed, path
        except OSError as error:
            assert files.may_pass(error), path
            ended.add(Path(path).name)
    assert {"dataset.json", "ledger.jsonl", "log.1.jsonl", "run"} <= ended


@pytest.mark.parametrize(("code", "ends"), [(errno.EIO, OSError), (errno.ENOSPC, 2)])
def test_a_new_run_that_cannot_be_written_is_reported_before_its_first_step(
    run, tmp_path, monkeypatch, capsys, code, ends
):
    """An error that may pass is not final; a full disk is, as the user must free it. No file
    remains that the next start would take for a run."""
    monkeypatch.setattr(lines, "RETRY_S", 0.01)
    settle = lines.Lines.settle
    monkeypatch.setattr(lines.Lines, "settle", lambda it, s: settle(it, min(s, 0.05)))
    write = os.write

    def failing(fd, data):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("ledger.jsonl"):
            raise OSError(code, os.strerror(code))
        return write(fd, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", failing)
        if ends == 2:
            assert run("--steps", "2") == 2
            assert "cannot be written: [Errno 28] No space left" in capsys.readouterr().err
        else:
            with pytest.raises(ends, match="Input/output error"):
                run("--steps", "2")
    assert not list((tmp_path / "run").glob("*.json")) and not list((tmp_path / "run").glob("log*"))
    assert run("--steps", "2") == 0
    assert [event["generation"] for event in read_ledger(tmp_path / "run")] == [1, 1, 1]


def test_each_failure_is_reported(run, start, tmp_path, caplog):
    """The line has file, error and time of the next try; the last error is raised."""
    assert run("--steps", "3") == 0
    with pytest.raises(OSError, match="Stale file handle"):
        start(errno.ESTALE, path=str(tmp_path / "run/ledger.jsonl"))
    told = [r.getMessage() for r in caplog.records if "next try" in r.getMessage()]
    assert len(told) == 3
    assert all("Stale file handle" in text and "ledger.jsonl" in text for text in told)


def test_each_log_that_a_start_reads_is_reported(run, start, tmp_path, monkeypatch):
    """The other ranks wait while rank 0 makes progress: many logs of a slow volume may take longer
    than their limit for one. Logs are read from the newest back to the wanted step."""
    assert run("--steps", "2") == run("--steps", "4") == 0
    (tmp_path / "run/log.2.jsonl").write_text("")
    told, open_run = [], begin.open_run
    monkeypatch.setattr(begin, "open_run", lambda *args: open_run(*args[:-1], told.append))
    assert start().step == 4
    assert told[-2:] == [f"reading the log of generation {n}" for n in (2, 1)]
    assert len({it.partition(",")[0] for it in told}) > 4  # the ranks need not wait for the rest


def test_the_read_of_a_file_of_flags_is_retried(run, reads, tmp_path):
    """The TOML file of --config may be on such a volume as well."""
    (tmp_path / "run").mkdir()
    toml = tmp_path / "run/job.toml"
    toml.write_text("[train]\nsteps = 2\n")
    for at in range(2):
        with reads.failing(errno.EIO, at=at):
            assert run("--config", str(toml)) == 0
        assert reads.seen[at] == str(toml)
    with reads.failing(errno.EIO, path=str(toml)), pytest.raises(OSError, match="Input/output"):
        run("--config", str(toml))


def test_the_read_of_an_unreadable_ledger_is_retried(run, reads, tmp_path):
    """The launcher asks if the run is finished: it gets "not yet", and asks again."""
    assert run("--steps", "3") == 0
    config = from_args(["--run-dir", str(tmp_path / "run"), "--steps", "3"])
    assert why_finished(config)
    for code in CODES:
        for at in range(4):
            with reads.failing(code, at=at):
                assert not why_finished(config), at


def test_a_command_beside_the_run_reports_a_missing_volume(run, reads, tmp_path):
    """The command prints one line, and ends with exit code 1, as it is no mistake of the user."""
    assert run("--steps", "3") == 0
    path = str(tmp_path / "run/ledger.jsonl")
    with reads.failing(errno.EIO, path=path):
        done = CliRunner().invoke(cli, ["sample", str(tmp_path / "run")])
    assert done.exit_code == 1 and "Input/output error" in done.stderr, done.stderr
    assert "when the volume is back" in done.stderr and "Traceback" not in done.stderr
