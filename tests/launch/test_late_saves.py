"""A save that outlives the life that began it: the launcher's, while the next life trains."""

import dataclasses
import os
from pathlib import Path

import pytest
from support.late_saves import GOES_ON, NAME, begin, overdue
from support.trainer_patches import lose_a_peer
from support.waiting import until

from gptddp.checkpoint import late, retention, store
from gptddp.distributed import known_lives
from gptddp.launch import rescue
from gptddp.launch.rescue import STOP_S
from gptddp.run import lease
from gptddp.run.history import Ledger, RunLog, history, read_ledger
from gptddp.training import life
from gptddp.training.live_state import LiveState


def test_a_state_that_every_later_life_has_gone_on_from_is_saved(left, save):
    """Two lives later, with its steps in the log and an event of its own life in the ledger."""
    for generation in (2, 3):
        begin(left, generation, **GOES_ON)
    assert save() == [NAME]
    assert [line["step"] for line in history(left)] == [1, 2, 3]
    event = read_ledger(left)[-1]
    assert (event["event"], event["generation"], event["name"]) == ("checkpoint", 1, NAME)
    assert event["chain_fp"] == list(history(left))[-1]["chain_fp"]
    assert os.listdir(left / "checkpoints/.tmp") == []
    assert save() == [NAME]  # not twice


AWAY = [
    {"source": "step-000000000002.1", "step": 2},
    {"source": "scratch", "step": 0},
    {"source": "memory", "step": 2},
    {},
    {"diverged": True},
]


@pytest.mark.parametrize("event", AWAY, ids=str)
@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_state_that_the_run_has_left_is_not_saved(left, save, monkeypatch, event, meanwhile):
    """A later life has begun from elsewhere, or the ranks have differed: known before, or found
    when all is written but the name. It would bring back a branch."""

    def go_away(*args):
        begin(left, 2, **(GOES_ON if "diverged" in event else event))
        if "diverged" in event:
            Ledger(left).event("diverged", 1)
        begin(left, 3, **GOES_ON)

    if meanwhile:
        sync = RunLog.sync
        monkeypatch.setattr(RunLog, "sync", lambda log: (go_away(), sync(log)))
    else:
        go_away()
    assert save() == [] and not any(e["event"] == "checkpoint" for e in read_ledger(left))
    assert not (left / "checkpoints/.tmp").exists() or not os.listdir(left / "checkpoints/.tmp")


def test_a_life_that_the_ledger_does_not_know_is_no_proof(left, save):
    """A log of a later life, without its start: from where it has gone on nobody can tell."""
    (left / "log.2.jsonl").touch()
    assert save() == []
    begin(left, 3, **GOES_ON)  # of a state of life 2, which may be of a branch
    assert save() == []
    begin(left, 2, **GOES_ON)  # memory has kept it
    assert save() == [NAME]


def test_nothing_is_saved_in_a_run_that_goes_on_without_this_pod(left, save, capfd):
    """The lease is that of a life that the pod was not in, and is looked at last too."""
    (left / "lease.json").unlink()
    held = lease.Claim(left, "job", "another life").poll(5)
    try:
        assert save() == [] and "a life that this pod was not in" in capfd.readouterr().err
        known_lives.note("another life")
        assert save() == [NAME]
    finally:
        held.close()


def test_a_newer_checkpoint_makes_it_needless(run, left, save, monkeypatch):
    """The next life may be faster: its own is the newest, and stays so."""
    sync = RunLog.sync

    def first(log):
        monkeypatch.setattr(RunLog, "sync", sync)
        assert run("--steps", "5") == 0
        sync(log)

    monkeypatch.setattr(RunLog, "sync", first)
    assert save() == ["step-000000000005.2"]


# -- a life that begins ----------------------------------------------------------------------------


@pytest.mark.parametrize("late_one", [True, False])
def test_a_life_asks_for_a_late_save_only_when_one_is_overdue(run, left, pod, own, late_one):
    """Then it does not begin with one of its own, which would do the work twice."""
    if late_one:
        overdue(left)
    lose_a_peer(run, "--steps", "9")
    assert late.asked(pod) == late_one and not late.asked(pod)
    assert own == []


def test_without_a_launcher_the_life_saves_at_once(run, left, own, monkeypatch):
    """Nobody else would."""
    overdue(left)
    monkeypatch.delenv("GPTDDP_VERDICT")
    lose_a_peer(run, "--steps", "9")
    assert own == [4]


def test_one_late_save_at_a_time(run, left, pod):
    """A life whose pods are saving already asks for no other, and spares the unfinished files of
    that one; those of a dead writer lose their chance to become a checkpoint."""
    overdue(left)
    tmp = left / "checkpoints/.tmp"
    mine, dead = f"{NAME}.{'ab' * 16}", f"step-000000000002.1.{'cd' * 16}"
    for name in (mine, dead):
        (tmp / name).mkdir(parents=True)
    with late.saving(pod) as note:
        note.write(NAME)
        assert late.in_progress(pod) == NAME
        lose_a_peer(run, "--steps", "9")
        assert not late.asked(pod) and os.listdir(tmp) == [mine]
        assert run("--steps", "6", "--checkpoint-every", "0") == 0
        assert os.listdir(tmp) == [mine]
    assert late.in_progress(pod) is None
    assert run("--steps", "7") == 0
    assert os.listdir(tmp) == os.listdir(left / "checkpoints/.trash") == []


def test_a_life_hands_newer_states_to_a_late_save(run, left, own, saver, monkeypatch):
    """States that all ranks have compared, with their fingerprint, when the log has their steps.
    Until it has ended the life does not save by itself, overdue or not; then it does."""
    compared, prints, check = [], [], life.check_replicas

    def noting(tensors, step, world):
        compared.append(step)
        prints.append(f"{check(tensors, step, world):016x}")
        return int(prints[-1], 16)

    monkeypatch.setattr(life, "check_replicas", noting)
    assert run("--steps", "35", "--checkpoint-every", "0") == 0
    saver.join(30)
    assert saver.got and saver.left.generation == 2
    assert saver.left.meta["state_fp"] == prints[compared.index(saver.left.step)]
    assert own and saver.left.step < own[0] < 35


def test_a_state_whose_steps_the_log_lacks_is_not_handed_over(run, saver, own, monkeypatch):
    """The log of a life has one writer, so the late save could not complete it. It ends, and the
    life saves."""
    monkeypatch.setattr(late, "STATE_S", 0.5)
    monkeypatch.setattr(RunLog, "sync_soon", lambda self: None)
    copies, copy = [], LiveState.copy
    monkeypatch.setattr(LiveState, "copy", lambda self: (copies.append(self), copy(self)))
    assert run("--steps", "35", "--checkpoint-every", "0") == 0
    saver.join(30)
    assert saver.got is False and own and len(copies) == 1


@pytest.mark.parametrize("slow", [True, False])
def test_a_slow_save_is_followed_by_that_of_a_newer_state(
    run, left, save, tmp_path, monkeypatch, slow
):
    """Until nobody leaves a newer one. After a quick one the life that trains saves by itself."""
    closed, every_s = rescue._closed, 0.0 if slow else 3600.0
    monkeypatch.setattr(
        rescue, "_closed", lambda c: dataclasses.replace(closed(c), checkpoint_every=every_s)
    )
    later = iter(["9", "12"])  # each life stops three steps on

    def newer_state(*args):
        maps = Path("/proc/self/maps").read_text()
        assert str(tmp_path / "memory") not in maps  # there may be no room for two
        if steps := next(later, None):
            lose_a_peer(run, "--steps", steps)
        return bool(steps)

    monkeypatch.setattr(late, "newer_state", newer_state)
    newer = ["step-000000000009.3", "step-000000000006.2"]
    assert save() == [*(newer if slow else []), NAME]


# -- the process that saves ------------------------------------------------------------------------

LAUNCHER = """
import os, signal, sys, time
from pathlib import Path
from gptddp.checkpoint import late, retention, store
from gptddp.flags import from_args
from gptddp.launch import forkserver
from gptddp.launch.rescue import LateSaves

run, memory, pod, how = map(Path, sys.argv[1:])
forkserver.PRELOAD[:] = []
late.STATE_S = 0.1
def hang(*args):
    if how.name == "deaf":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    Path(pod, "hangs").touch()
    while not Path(pod, "go").exists():
        time.sleep(600 if how.name == "deaf" else 0.02)
    rename(*args)
rename, store._rename_new = store._rename_new, hang
forkserver.start_server(pod)
saves = LateSaves(from_args(["--run-dir", str(run)]), memory, pod)
late.ask(pod)
saves.poll()
while not Path(pod, "hangs").exists():
    time.sleep(0.02)
while how.name == "waits" and late.in_progress(pod):
    time.sleep(0.02)
began = time.monotonic()
saves.stop()
print(time.monotonic() - began, file=sys.stderr, flush=True)
os._exit(0)
"""


@pytest.fixture
def launcher(forked, left, pod, tmp_path):
    """A launcher's process whose worker has just asked; `how` its late save goes."""
    begin(left, 2, **GOES_ON)
    return lambda how: forked(LAUNCHER, str(left), str(tmp_path / "memory"), str(pod), how)


def unfinished(run_dir):
    return list((run_dir / "checkpoints/.tmp").glob("step-*"))


def test_it_commits_while_its_launcher_goes_on(left, launcher, pod):
    """A process of the launcher's: whole, under its name."""
    (pod / "go").touch()
    assert launcher("waits").wait(60) == 0
    assert store.names(left) == [NAME] and retention.verify(left / "checkpoints" / NAME).ok


def test_it_is_taken_back_when_the_pod_ends(left, launcher, pod):
    """Nothing unfinished is left, and the launcher hardly waits."""
    process = launcher("hangs")
    assert process.wait(60) == 0
    until(lambda: late.in_progress(pod) is None)
    assert unfinished(left) == [] and store.names(left) == []


def test_one_that_hangs_does_not_hold_up_the_launcher(launcher, pod):
    """As on a volume that does not answer, where no signal is heard."""
    process = launcher("deaf")
    assert process.wait(60) == 0
    assert STOP_S <= float(process.stderr.read().split()[-1]) < 10 * STOP_S
    until(lambda: late.in_progress(pod) is None)


def test_it_ends_with_its_launcher(run, left, launcher, pod):
    """Killed with the pod: what it leaves unfinished the next save removes."""
    process = launcher("waits")
    until(lambda: late.in_progress(pod) == NAME and (pod / "hangs").exists(), 60)
    process.kill()
    until(lambda: late.in_progress(pod) is None)
    assert len(unfinished(left)) == 1
    assert run("--steps", "5") == 0
    assert unfinished(left) == []
