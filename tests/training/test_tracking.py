"""A tracker gets the settled steps, once. `make test-track` has the real trackers."""

import errno
import os
import shutil
import signal
from contextlib import contextmanager

import click
import pytest
from click.testing import CliRunner

from gptddp.cli import cli
from gptddp.errors import ConfigError
from gptddp.files import lock
from gptddp.k8s.cli.main import cli as k8s
from gptddp.run.history import history
from gptddp.track import feed, trackers
from gptddp.training.tracking import Tracking


def at_once(within_s):
    """`gptddp track` without --follow, until its end."""
    return True


@pytest.fixture
def shown(monkeypatch):
    """The content of a fake tracker: by id, the name and the steps."""
    found = {}

    @contextmanager
    def opened(folder, id, name, config):
        steps = found.setdefault(id, (name, []))[1]
        yield steps[-1][0] if steps else 0, steps.extend

    monkeypatch.setitem(feed.TRACKERS, "wandb", opened)
    return found


def test_the_steps_of_a_checkpoint_are_sent_once(run, tmp_path, shown):
    """Until the run is finished, its last step is held back: it may lack its evaluation."""
    folder = tmp_path / "run"
    assert run("--steps", "6", "--eval-every", "4") == 0
    ledger = folder / "ledger.jsonl"
    whole = ledger.read_bytes()
    ledger.write_bytes(b"".join(line for line in whole.splitlines(True) if b'"stop"' not in line))
    assert feed.track(folder, "wandb", at_once) == 5
    ledger.write_bytes(whole)
    assert [feed.track(folder, "wandb", at_once) for _ in range(2)] == [6, 6]
    ((name, rows),) = shown.values()
    lines = list(history(folder))
    assert (name, [row[0] for row in rows]) == ("run", [1, 2, 3, 4, 5, 6])
    for (_, when, values), line in zip(rows, lines, strict=True):
        assert when == line["time"] and values["generation"] == 1
        assert {"loss", "lr", "tok_s", "world_size"} < values.keys() < {*line, "generation"}
    assert "val_loss" in rows[3][2] and "val_loss" in rows[5][2]


def test_a_run_that_went_back_is_another_run_in_the_tracker(run, tmp_path, shown):
    """The new run has all its steps; earlier data stays as it was."""
    folder = tmp_path / "run"
    for flags in (("--steps", "4"), ("--steps", "8"), ("--steps", "6", "--from-step", "4")):
        assert run(*flags, "--keep", "9") == 0
        feed.track(folder, "wandb", at_once)
    (first, steps), (second, others) = shown.values()
    assert (first, [row[0] for row in steps]) == ("run", list(range(1, 9)))
    assert (second, [row[0] for row in others]) == ("run-from-4-1", list(range(1, 7)))
    assert [row[2]["generation"] for row in others] == [1] * 4 + [3] * 2


def test_a_run_that_started_again_is_another_run_in_the_tracker(run, tmp_path, shown, monkeypatch):
    """After --from-scratch the new numbers never mix with the old ones."""
    monkeypatch.setattr("gptddp.checkpoint.known.RETRY_S", ())
    folder = tmp_path / "run"
    assert run("--steps", "4") == 0
    feed.track(folder, "wandb", at_once)
    shutil.rmtree(folder / "checkpoints")
    for flags in (("--steps", "6", "--from-scratch"), ("--steps", "8")):
        assert run(*flags) == 0
        feed.track(folder, "wandb", at_once)
    (_, steps), (again, others) = shown.values()
    assert [row[0] for row in steps] == list(range(1, 5))
    assert (again, [row[0] for row in others]) == ("run-from-scratch-2", list(range(1, 9)))


def test_a_dead_tracking_process_is_replaced_at_the_end(tmp_path):
    """One new process sends the rest, however often the end is announced."""
    tracking = Tracking()
    tracking.begin(str(tmp_path), "wandb")
    dead = tracking._process
    dead.kill()
    dead.wait()
    tracking.end()
    assert (other := tracking._process) is not dead and tracking.busy
    tracking.end()
    assert tracking._process is other
    other.wait(30)
    assert not tracking.busy


def test_a_tracker_that_does_not_answer_is_named_at_the_end(tmp_path, monkeypatch, caplog):
    """The log names the tracker once, with the command that sends the missing steps."""
    monkeypatch.setattr("gptddp.training.tracking._END_S", 0.0)
    tracking = Tracking()
    tracking.begin(str(tmp_path), "wandb")
    process = tracking._process
    assert not tracking.busy and caplog.text == ""
    process.send_signal(signal.SIGSTOP)
    tracking.end()
    assert not tracking.busy and not tracking.busy
    process.kill()
    process.wait()
    assert caplog.text.count("wandb does not answer") == 1
    assert f"`gptddp track {tmp_path} --to wandb` sends the missing steps" in caplog.text


def test_an_error_of_the_run_directory_is_one_line(run, tmp_path, shown, monkeypatch):
    """A ledger without a start, and a read-only volume, give one line each."""
    assert run("--steps", "2") == 0
    (tmp_path / "run" / "ledger.jsonl").write_bytes(b"")
    with pytest.raises(ConfigError, match="has no start of a life"):
        feed.track(tmp_path / "run", "wandb", at_once)

    def read_only(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(feed, "lock", read_only)
    with pytest.raises(click.ClickException, match="lacks steps .*Read-only file system"):
        feed.track(tmp_path / "run", "wandb", at_once)


def test_one_process_tracks_at_a_time(run, tmp_path, shown):
    """A second process is refused without --follow; nothing is sent twice."""
    assert run("--steps", "2") == 0
    held = lock(tmp_path / "run" / "track.wandb.lock")
    with pytest.raises(ConfigError, match="another process tracks"):
        feed.track(tmp_path / "run", "wandb", at_once)
    assert shown == {}
    os.close(held)
    assert feed.track(tmp_path / "run", "wandb", at_once) == 2


def test_an_unreachable_tracker_is_retried(run, tmp_path, shown, monkeypatch, capsys):
    """The failure is reported, and is an error only at the end; then the missing steps are sent."""
    assert run("--steps", "2") == 0
    opened, waits = feed.TRACKERS["wandb"], []

    def away(*run):
        raise OSError("no route\nto it")

    def over(within_s):
        waits.append(within_s)
        if within_s == feed._RETRY_S:
            monkeypatch.setitem(feed.TRACKERS, "wandb", opened)
        return within_s == feed._POLL_S

    monkeypatch.setitem(feed.TRACKERS, "wandb", away)
    with pytest.raises(click.ClickException, match="lacks steps .no route to it.; `gptddp track`"):
        feed.track(tmp_path / "run", "wandb", at_once)
    assert feed.track(tmp_path / "run", "wandb", over) == 2
    assert "wandb lacks steps (no route to it)" in capsys.readouterr().err
    assert waits == [0, feed._RETRY_S, feed._POLL_S]


@pytest.mark.parametrize("folder", [False, True], ids=["absent", "a folder of that name"])
def test_without_the_trackers_package_nothing_starts(run, tmp_path, monkeypatch, capsys, folder):
    """`train`, `track` and `submit --local` give exit code 2 and one line with the fix."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(trackers.TRACKERS, "tracker_of_ours", feed.TRACKERS["wandb"])
    with pytest.raises(ConfigError, match="pip install 'gptddp.tracker_of_ours.'"):
        if folder:
            (tmp_path / "tracker_of_ours").mkdir()
        trackers.check_installed("tracker_of_ours")
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    assert run("--track", "wandb") == 2
    said = capsys.readouterr().err
    by_hand = CliRunner().invoke(cli, ["track", str(tmp_path / "run"), "--to", "wandb"])
    where = ["--local-dir", str(tmp_path / "local")]
    submitted = CliRunner().invoke(k8s, ["submit", "--local", *where, "--", "--track", "wandb"])
    assert (by_hand.exit_code, submitted.exit_code) == (2, 2)
    assert not (tmp_path / "run").exists() and not (tmp_path / "local").exists()
    for text in (said, by_hand.stderr, submitted.stderr):
        assert "the package wandb is not installed: pip install 'gptddp[wandb]'" in text
        assert "make image EXTRAS=wandb" in text and text.count("\n") == 1
