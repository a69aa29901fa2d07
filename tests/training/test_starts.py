"""A volume that fails for a moment, or for good, while a life begins: at every read of a start.

tests/faults/test_starts.py has the same for a whole training.
"""

import errno
import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.failing_volume import Reads
from support.toy import SMALL
from support.trainer_patches import lose_a_peer

from gptddp import files
from gptddp.cli import cli
from gptddp.data.dataset import open_dataset
from gptddp.distributed.connect import World, connect
from gptddp.errors import ConfigError
from gptddp.files import patiently
from gptddp.flags import from_args
from gptddp.run import directory, lines
from gptddp.run.history import read_ledger
from gptddp.run.in_force import is_finished
from gptddp.run.origin import Origin
from gptddp.training import begin

# a disk's or NFS's; those of SMB, of FUSE, Lustre and Ceph that have lost their server
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

    The run directory and the memory are put back as they were at the first call.
    """
    flags = [*SMALL, "--data", str(corpus), "--run-dir", str(tmp_path / "run"), "--steps", "9"]
    config = from_args(flags)
    with ExitStack() as stack:
        worlds: list[World] = []

        def origin(*fault, **which) -> Origin:
            if not worlds:
                worlds.append(stack.enter_context(connect("cpu")))
            for name in ("run", "memory"):
                kept = tmp_path / f"{name}.kept"
                if not kept.exists():
                    shutil.copytree(tmp_path / name, kept)
                shutil.rmtree(tmp_path / name)
                shutil.copytree(kept, tmp_path / name)
            with reads.failing(*fault or (0,), **which):
                dataset = patiently(lambda: open_dataset(config.data))
                patiently(dataset.tokenizer)
                state = begin.newest_state(config, dataset, worlds[0])
            if state.lease:
                state.lease.release()
            return state.origin

        yield origin


def prepared(kind: str, run, tmp_path: Path) -> None:
    """A run of a few steps whose newest state is in memory alone, or a checkpoint."""
    if kind == "memory":
        lose_a_peer(run, "--steps", "9", at=4)
    else:
        assert run("--steps", "3") == 0


@pytest.mark.parametrize("kind", ["memory", "checkpoint"])
def test_a_read_that_fails_once_changes_nothing(kind, run, start, reads, tmp_path):
    """Each single read of a start, with one of these errors: it is tried again, and the life goes
    on from the same state of the same run, with the same configuration."""
    prepared(kind, run, tmp_path)
    undisturbed = start()
    assert undisturbed.step == 3 and (undisturbed.source == "memory") == (kind == "memory")
    number = len(reads.seen)
    assert number > 20
    for at in range(number):
        assert start(CODES[at % len(CODES)], at=at) == undisturbed, (at, reads.seen[at])
        assert len(reads.seen) > at


@pytest.mark.parametrize("kind", ["memory", "checkpoint"])
def test_a_file_that_stays_unreadable_ends_in_nothing_final(kind, run, start, reads, tmp_path):
    """Each file and directory that a start reads: the life is the undisturbed one's, or it ends by
    an error that is tried again; never another identity, nor from scratch, nor a final error."""
    prepared(kind, run, tmp_path)
    undisturbed, ended = start(), set()
    paths = sorted({*reads.seen, *(str(Path(path).parent) for path in reads.seen)})
    for i, path in enumerate(paths):
        try:
            assert start(CODES[i % len(CODES)], path=path) == undisturbed, path
        except OSError as error:
            assert files.may_pass(error), path
            ended.add(Path(path).name)
    assert {"config.json", "dataset.json", "ledger.jsonl", "log.1.jsonl", "run"} <= ended


def test_a_new_run_that_cannot_be_written_just_now_is_not_refused(
    run, start, tmp_path, monkeypatch
):
    """EIO at the first write is tried again, as a read is; a full disk is the user's to mend."""
    (tmp_path / "run").mkdir()
    write, codes = directory.write_json_atomic, [errno.EIO, errno.ESTALE]

    def failing(*args):
        if codes:
            code = codes.pop()
            raise OSError(code, os.strerror(code))
        return write(*args)

    monkeypatch.setattr(directory, "write_json_atomic", failing)
    assert start().source == "scratch" and not codes
    codes += [errno.EIO] * 4
    with pytest.raises(OSError, match="Input/output error"):
        start()
    codes.append(errno.ENOSPC)
    with pytest.raises(ConfigError, match="No space left"):
        start()


def test_each_failure_is_told(run, start, tmp_path, caplog):
    """Which file, which error, and when it is tried again; the last one is raised."""
    prepared("checkpoint", run, tmp_path)
    with pytest.raises(OSError, match="Stale file handle"):
        start(errno.ESTALE, path=str(tmp_path / "run/config.json"))
    told = [r.getMessage() for r in caplog.records if "next try" in r.getMessage()]
    assert len(told) == 3
    assert all("Stale file handle" in text and "config.json" in text for text in told)


def test_each_log_that_a_start_reads_is_told(run, start, tmp_path, monkeypatch):
    """The other ranks wait as long as rank 0 gets further: many logs of a slow volume may take
    longer than they wait for one. They are read from the newest back to the step that is wanted."""
    assert run("--steps", "2") == run("--steps", "4") == 0
    (tmp_path / "run/log.2.jsonl").write_text("")
    told, open_run = [], begin.open_run
    monkeypatch.setattr(begin, "open_run", lambda *args: open_run(*args[:-1], told.append))
    assert start().step == 4
    assert told[-2:] == ["reading the log, life 2", "reading the log, life 1"]
    assert len({it.partition(",")[0] for it in told}) > 4  # nor have they to wait for all else


def test_a_write_of_the_books_that_fails_once_is_told(run, tmp_path, monkeypatch, caplog):
    """The ledger's first line: it is written at the next try, and the log says so."""
    monkeypatch.setattr(lines, "RETRY_S", 0.01)
    write, failed = os.write, []

    def failing(fd, data):
        if not failed and os.readlink(f"/proc/self/fd/{fd}").endswith("ledger.jsonl"):
            failed.append(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return write(fd, data)

    monkeypatch.setattr(os, "write", failing)
    assert run("--steps", "2") == 0 and failed
    assert [event["event"] for event in read_ledger(tmp_path / "run")][0] == "start"
    told = [r.getMessage() for r in caplog.records if "Input/output error" in r.getMessage()]
    assert len(told) == 1 and "ledger.jsonl" in told[0] and "tried again" in told[0]


def test_a_lost_configuration_is_taken_from_the_ledger(run, start, tmp_path, caplog):
    """Removed or torn: written anew, with the id by which the state in memory is the run's own,
    and with the flags that the run was begun with; what was torn is kept."""
    lose_a_peer(run, "--steps", "9", "--lr", "0.0125", at=4)
    undisturbed = start()
    assert undisturbed.source == "memory" and undisturbed.config.lr == 0.0125
    for torn in (None, b'{"config": {"n_lay'):
        config = tmp_path / "run.kept/config.json"
        config.unlink() if torn is None else config.write_bytes(torn)
        assert start() == undisturbed
        saved = json.loads((tmp_path / "run/config.json").read_text())
        assert saved["run_id"] == undisturbed.run_id
    assert (tmp_path / "run/config.json.bad").read_bytes() == torn
    assert "config.json is gone" in caplog.text and "config.json is torn" in caplog.text


@pytest.mark.parametrize("kind", ["memory", "checkpoint"])
def test_a_run_without_any_identity_is_refused_or_goes_on(kind, run, start, tmp_path):
    """Its ledger is of an older version, and config.json lost: without a checkpoint it is refused
    with the way out, with one it goes on from it."""
    prepared(kind, run, tmp_path)
    events = read_ledger(tmp_path / "run")
    lines = [{k: v for k, v in e.items() if k not in ("run_id", "config")} for e in events]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "run/ledger.jsonl").write_text(text)
    (tmp_path / "run/config.json").unlink()
    if kind == "checkpoint":
        assert start().source == "step-000000000003.1"
        return
    with pytest.raises(ConfigError, match="put config.json back from a backup"):
        start()
    assert not (tmp_path / "run/config.json").exists()


def test_a_listed_configuration_that_is_not_found_makes_no_identity(
    run, start, tmp_path, monkeypatch
):
    """A network volume may say so of a file that is there: the directory's list tells."""
    prepared("memory", run, tmp_path)
    undisturbed = start()
    read_bytes, times = Path.read_bytes, [2]

    def lost(path):
        if path.name == "config.json" and times[0]:
            times[0] -= 1
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", lost)
    assert start() == undisturbed and times == [0]


def test_a_file_of_flags_is_asked_for_again(run, reads, tmp_path):
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


def test_a_marker_that_cannot_be_read_is_asked_for_again(run, reads, tmp_path):
    """The launcher's look at a finished run: "not yet", which it repeats; never "finished"."""
    assert run("--steps", "3") == 0
    config = from_args(["--run-dir", str(tmp_path / "run"), "--steps", "3"])
    assert is_finished(config)
    for code in CODES:
        for at in range(4):
            with reads.failing(code, at=at):
                assert not is_finished(config), at


def test_a_command_beside_the_run_says_that_the_volume_is_away(run, reads, tmp_path):
    """One line and exit code 1, which is no mistake of the user's, and no traceback."""
    assert run("--steps", "3") == 0
    path = str(tmp_path / "run/config.json")
    with reads.failing(errno.EIO, path=path):
        done = CliRunner().invoke(cli, ["checkpoints", str(tmp_path / "run"), "--prune"])
    assert done.exit_code == 1 and "Input/output error" in done.stderr, done.stderr
    assert "when the volume is back" in done.stderr and "Traceback" not in done.stderr
