"""--from-step: a run goes back to a kept checkpoint, once, after any kill."""

import errno
import math
import os
import re
import shutil
from pathlib import Path

import pytest
from support.toy import trained
from support.trainer_patches import lose_a_peer
from support.waiting import until
from support.waiting_writer import save_in_this_process

from gptddp import train
from gptddp.audit import audit
from gptddp.checkpoint import run_state, store
from gptddp.checkpoint.writer import Writer
from gptddp.config import Config
from gptddp.errors import Superseded
from gptddp.run import branches
from gptddp.run.history import logged, read_ledger
from gptddp.run.lease import Lease
from gptddp.training.go_back import way_back

BACK = ("--steps", "12", "--from-step", "4", "--lr", "1e-3")


@pytest.fixture(scope="module")
def kept(corpus, tmp_path_factory):
    """A run that has kept steps 2, 4, 6 and 8, each the last of a life."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    for steps in ("2", "4", "6", "8"):
        trained(corpus, folder, "--keep", "9", "--steps", steps)
    return folder


@pytest.fixture
def folder(kept, tmp_path):
    """A copy of that run."""
    return Path(shutil.copytree(kept, tmp_path / "run"))


def starts(folder):
    return [it for it in read_ledger(folder) if it["event"] == "start"]


def of_branches(folder):
    return [it for it in read_ledger(folder) if it["event"] == "branch"]


def lives(folder):
    """By step: the life whose line counts."""
    return {line["step"]: life for life, line in logged(folder)}


def test_a_run_that_has_blown_up_goes_back(run, tmp_path, monkeypatch, capsys):
    """At exit code 3 the run names the flag that helps; another start without it ends in the same
    way. With it the run finishes, with the log and checkpoints of the branch."""
    folder, flags = tmp_path / "run", ("--steps", "16", "--checkpoint-every", "0", "--keep", "2")
    assert run(*flags, "--steps", "6") == 0
    forward_backward = train.forward_backward

    def when_spoilt_weights_are_saved(ddp, batch, targets, step, *rest):
        if step == 10:
            until(lambda: [*folder.glob("checkpoints/step-*.[23]/manifest.json")])
        return forward_backward(ddp, batch, targets, step, *rest)

    for lr in ("1e30", "1e-3"):
        with monkeypatch.context() as patch:
            patch.setattr(train, "forward_backward", when_spoilt_weights_are_saved)
            assert run(*flags, "--lr", lr, "--max-skipped", "3") == 3
        assert "to go back to step 6: --from-step 6, with a lower --lr" in capsys.readouterr().err
    ends = [it["cause"] for it in read_ledger(folder) if it["event"] == "end"]
    assert ends == ["loss or gradient not finite 4 times in a row"] * 2
    assert run(*flags, "--lr", "1e-3", "--from-step", "6") == 0
    assert lives(folder) == dict.fromkeys(range(1, 7), 1) | dict.fromkeys(range(7, 17), 4)
    assert starts(folder)[-1]["source"] == "step-000000000006.4"
    assert all(line["loss"] for _, line in logged(folder))
    report = audit(folder, "", whole=True)
    assert report.exit_code == 0 and (report.begin, report.end) == (0, 16)


def test_the_way_back_leads_before_the_step_that_spoilt_the_weights(folder, tmp_path):
    """The named checkpoint is two steps before the first bad one, or one if no other is kept."""
    for bad, step in ((9, 6), (8, 6), (7, 4), (3, 2)):
        assert f"to go back to step {step}: --from-step {step}, with" in way_back(folder, bad)
    assert "no earlier checkpoint is kept: begin again" in way_back(folder, 2)
    assert "no checkpoint was saved yet: start again from step 0" in way_back(tmp_path / "none", 2)


def test_the_way_back_leads_before_losses_that_were_far_too_large_but_finite(
    run, tmp_path, monkeypatch, capsys
):
    """The named step is before all reported losses, although later checkpoints are kept."""
    forward_backward = train.forward_backward

    def blowing_up(ddp, batch, targets, step, *rest):
        nats = forward_backward(ddp, batch, targets, step, *rest)
        return nats * (1 if step < 20 else 1000 if step < 24 else math.nan)

    monkeypatch.setattr(train, "forward_backward", blowing_up)
    flags = ("--checkpoint-every", "0", "--keep", "30", "--max-skipped", "3")
    assert run("--steps", "40", *flags) == 3
    first = next(it["step"] for it in read_ledger(tmp_path / "run") if it["event"] == "spike")
    named = re.search(r"--from-step (\d+), ", capsys.readouterr().err)
    assert 0 < int(named[1]) < first - 1


def test_the_same_command_again_continues(run, folder, monkeypatch, caplog):
    """Pods keep their flags, so the run goes back once, even if it was extended since. With another
    rate or another step, even an abandoned one, it goes back again."""
    assert run(*BACK[2:], "--steps", "9") == 0
    assert run("--steps", "10") == 0
    assert run(*BACK[2:]) == 0
    assert [it["step"] for it in starts(folder)[4:]] == [4, 9]
    assert lives(folder) == {1: 1, 2: 1, 3: 2, 4: 2} | dict.fromkeys(range(5, 10), 5) | {10: 6}
    assert run(*BACK, "--steps", "10", "--lr", "2e-3") == 0
    assert starts(folder)[-1]["source"] == "step-000000000004.7"
    assert run("--steps", "9", "--from-step", "8") == 0
    assert [it["name"][-3:] for it in of_branches(folder)] == ["4.2", "4.5", "8.4"]
    assert list(lives(folder).values()) == [1, 1, 2, 2, 3, 3, 4, 4, 8]
    assert "checkpoint skipped" not in caplog.text and "lacks" not in caplog.text


def die(*args, **kwargs):
    raise SystemExit("killed")


SAVE = Writer.submit


def saved_and_dead(writer, *args, **kwargs):
    SAVE(writer, *args, **kwargs)
    writer.wait()
    die()


KILLS = {
    "before the checkpoint": ("gptddp.training.go_back.Writer.submit", die),
    "after it": ("gptddp.training.go_back.Writer.submit", lambda *a, **k: saved_and_dead(*a, **k)),
    "before the start": ("gptddp.training.recorder.Recorder._start", die),
}


def test_on_a_full_disk_nothing_is_deleted(run, folder, monkeypatch):
    """The checkpoint of the branch gets no room by a deletion; the next start commits it."""

    def full(*args):
        raise OSError(errno.ENOSPC, "full")

    before = sorted(store.names(folder))
    with monkeypatch.context() as patch:
        save_in_this_process(patch.setattr)
        patch.setattr(store, "commit", full)
        assert run(*BACK) in (1, 2)
    assert sorted(store.names(folder)) == before
    assert run(*BACK) == 0 and starts(folder)[-1]["step"] == 4


def test_a_life_that_has_lost_the_run_begins_no_branch(run, folder, monkeypatch):
    """If another life has taken the run while this one read the checkpoint, no branch begins."""

    def lost(self):
        raise Superseded("has taken over the run")

    with monkeypatch.context() as patch:
        patch.setattr(Lease, "check", lost)
        assert run(*BACK) == Superseded.exit_code
    assert of_branches(folder) == [] and len(store.names(folder)) == 4


@pytest.mark.parametrize("flag", [("--from-step", "4"), ()])
@pytest.mark.parametrize("where", KILLS)
def test_after_a_kill_anywhere_the_next_start_goes_back(run, folder, monkeypatch, where, flag):
    """With the flag or without it the run is on the branch, and does not go back twice."""
    with monkeypatch.context() as patch:
        patch.setattr(*KILLS[where])
        with pytest.raises(SystemExit):
            run(*BACK)
    lose_a_peer(run, "--steps", "12", *flag)
    assert starts(folder)[-1]["source"].startswith("step-000000000004.")
    assert run("--steps", "12", *flag) == 0
    assert starts(folder)[-1]["source"].startswith("step-000000000004.")
    assert len(of_branches(folder)) == 1
    assert run_state.read(folder).config["lr"] == 1e-3  # the flags given with it are in force
    begun = starts(folder)[-1]["generation"]
    assert [life for step, life in lives(folder).items() if step > 4][0] == begun


def test_a_branch_with_a_damaged_checkpoint_continues_from_its_own(run, folder):
    """The branch uses no later step, which the run has abandoned, and no damaged checkpoint."""
    assert run(*BACK[2:], "--steps", "6") == 0
    for step, life in ((6, 5), (4, 5)):
        os.truncate(folder / "checkpoints" / store.name_of(step, life) / "manifest.json", 10)
    assert run("--steps", "7") == 0
    assert starts(folder)[-1]["source"] == "step-000000000004.2"
    assert lives(folder) == {1: 1, 2: 1, 3: 2, 4: 2, 5: 6, 6: 6, 7: 6}


def test_a_run_goes_back_to_a_checkpoint_that_is_listed_late(run, folder, monkeypatch):
    """If a network file system does not list the checkpoint yet, the ledger has its name."""
    real = os.listdir
    late = store.name_of(4, 2)
    monkeypatch.setattr(
        store.os, "listdir", lambda path: [name for name in real(path) if name != late]
    )
    assert run(*BACK) == 0
    assert starts(folder)[-1]["source"] == "step-000000000004.5"


def test_a_finished_run_that_must_go_back_is_not_finished(run, folder):
    """Launchers start a run that must go back; it is finished again at the end of the branch."""
    asked = Config(run_dir=str(folder), steps=8, from_step=4, lr=1e-3)
    assert not run_state.why_finished(asked)
    assert run(*BACK, "--steps", "8") == 0
    assert run_state.why_finished(asked) and not run_state.why_finished(
        Config(run_dir=str(folder), steps=8, from_step=2)
    )


def test_a_step_without_a_checkpoint_is_refused(run, folder, capsys):
    """The message lists the existing steps, and nothing changes, also for a damaged checkpoint."""
    before = read_ledger(folder)
    assert run("--steps", "12", "--from-step", "5") == 2
    assert "no checkpoint of step 5: use one of these: 2, 4, 6, 8" in capsys.readouterr().err
    os.truncate(folder / "checkpoints" / store.name_of(6, 3) / "manifest.json", 10)
    assert run("--steps", "12", "--from-step", "6") == 4
    assert "manifest.json does not match its own hash: use another step" in capsys.readouterr().err
    assert read_ledger(folder) == before and starts(folder)[-1]["generation"] == 4


@pytest.mark.parametrize(
    ("ways", "on", "left"),
    [
        ([], [(1, 99)], []),
        ([(3, 20, 1)], [(1, 20), (2, 20), (3, 1), (3, 60), (4, 21)], [(1, 21), (2, 30)]),
        ([(3, 20, 1), (5, 10, 1)], [(1, 10), (5, 11)], [(1, 11), (3, 9), (4, 30)]),
        ([(3, 20, 1), (5, 30, 3)], [(1, 20), (3, 30), (4, 30), (5, 31)], [(1, 21), (3, 31)]),
        ([(2, 20, 1), (3, 50, 1)], [(1, 50), (3, 51)], [(2, 20), (2, 30), (1, 51)]),
        ([(2, 20, 1), (3, 25, 2), (4, 50, 1)], [(1, 50), (4, 1)], [(2, 21), (3, 26), (1, 51)]),
    ],
)
def test_which_steps_belong_to_the_run(ways, on, left):
    """For each branch (first generation, step, life of the checkpoint): later steps of older lives
    are abandoned; so is a branch with all its lives if a later branch begins before it."""
    known = [{"generation": it[0], "step": it[1], "life": it[2]} for it in ways]
    assert [it for it in (*on, *left) if branches.is_on(known, *it)] == on
