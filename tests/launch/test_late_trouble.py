"""Late saves that fail, hang or never begin, and machines that see files late."""

import dataclasses
import os
import signal
import threading
import time

import pytest
from support.late_saves import NAME, overdue
from support.trainer_patches import lose_a_peer

from gptddp.checkpoint import late, shard
from gptddp.distributed import pulse
from gptddp.launch import rescue
from gptddp.run import history
from gptddp.run.history import Ledger, RunLog, log_path
from gptddp.training import saves
from gptddp.training.events import Events
from gptddp.training.late_save import LateSave
from gptddp.training.live_state import LiveState

NEXT = "step-000000000006.2"  # of the life that goes on from what is left


@pytest.mark.parametrize("handed", [True, False])
def test_the_log_of_a_life_that_trains_on_has_one_writer(run, left, save, monkeypatch, handed):
    """Another machine may list the run's directory as it was before that life. But what a fault has
    left in place of the state handed over is of a life that is over, and its steps are added."""
    closed, listed = rescue._closed, history.log_generations
    monkeypatch.setattr(
        rescue, "_closed", lambda c: dataclasses.replace(closed(c), checkpoint_every=0.0)
    )
    if handed:
        monkeypatch.setattr(LiveState, "leave_snapshot", lambda self, *why: self.copy())
    logs = []

    def newer_state(*args):
        if not logs:
            lose_a_peer(run, "--steps", "9")
            monkeypatch.setattr(history, "log_generations", lambda run: listed(run)[:1])
            logs.append(log_path(left, 2).read_bytes())
            return True
        return False

    monkeypatch.setattr(late, "newer_state", newer_state)
    assert save() == [NEXT, NAME] and logs[0].count(b"\n") == 3
    assert (log_path(left, 2).read_bytes() == logs[0]) == handed


def test_a_state_that_no_rank_has_left_with_a_word_has_its_steps_added(request, monkeypatch):
    """All ranks were killed after a copy was left, and before it was handed over: that life is
    over."""
    monkeypatch.setattr(LiveState, "leave_snapshot", lambda self, *why: self.copy())
    run, save = request.getfixturevalue("left"), request.getfixturevalue("save")
    assert save() == [NAME] and [line["step"] for line in history.history(run)] == [1, 2, 3]


# -- a life whose late save comes to nothing -------------------------------------------------------


def newest(monkeypatch) -> list:
    """The steps of the newest checkpoints that the life tells of."""
    emit, known = Events.emit, []

    def noting(events, kind, **fields):
        if kind == "newest" and fields["step"]:
            known.append(fields["step"])
        emit(events, kind, **fields)

    monkeypatch.setattr(Events, "emit", noting)
    return known


@pytest.mark.parametrize("begin_s", [0.0, 60.0])
def test_one_that_never_begins_is_not_waited_for(run, left, own, monkeypatch, begin_s):
    """The launcher's process cannot be made, or an older one hangs: lives that are shorter than
    --checkpoint-every would never save."""
    monkeypatch.setattr(saves, "BEGIN_S", begin_s)
    overdue(left)
    lose_a_peer(run, "--steps", "9")
    assert own == ([] if begin_s else [5])


@pytest.mark.parametrize("fails", [True, False])
def test_after_one_that_has_failed_the_life_saves_at_once(
    run, left, pod, own, saver, monkeypatch, fails
):
    """After one that has not, --checkpoint-every later; the metrics of rank 0 know of it."""
    known = newest(monkeypatch)
    monkeypatch.setattr(saves, "BEGIN_S", 0.0)

    def newer_state(folder):
        time.sleep(0.3)
        if not fails:
            Ledger(left).event("checkpoint", 1, step=3, name=NAME, write_s=1.0)

    monkeypatch.setattr(late, "newer_state", newer_state)
    assert run("--steps", "25") == 0
    saver.join(30)
    assert len(own) == 1 + fails and own[-1] == 25
    assert known == ([] if fails else [3])


def test_beside_one_that_may_hang_as_the_one_before_the_life_saves_by_itself(
    run, pod, own, saver, monkeypatch
):
    """Else a pod whose volume hangs would keep each life from saving, for ten minutes."""
    monkeypatch.setattr(late, "relieves", lambda folder: False)
    assert run("--steps", "25", "--checkpoint-every", "0") == 0
    saver.join(30)
    assert saver.got and own[0] <= saver.left.step


def test_a_save_at_the_end_has_the_volume_to_itself(run, saver, monkeypatch):
    """At a stop no state is handed over: rank 0 saves that very state."""
    monkeypatch.setattr(late, "STATE_S", 0.5)
    monkeypatch.setattr(RunLog, "sync_soon", RunLog.sync)
    copy = LateSave.copy

    def then_stop(self, step):
        copy(self, step)
        if self._copied:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(LateSave, "copy", then_stop)
    assert run("--steps", "60", "--checkpoint-every", "0") == 143
    saver.join(30)
    assert saver.got is False


def test_a_file_that_cannot_be_looked_at_ends_no_life(run, pod, saver, monkeypatch):
    """The process that saves waits in vain, and ends after a while."""

    def in_vain(folder):
        (pod / "late.more").symlink_to(pod / "late.more")
        time.sleep(0.3)

    monkeypatch.setattr(late, "newer_state", in_vain)
    assert run("--steps", "20") == 0


# -- the process that saves ------------------------------------------------------------------------


def test_a_save_that_took_long_is_worth_a_long_wait(pod, monkeypatch):
    """A step or an evaluation may take longer than STATE_S."""
    monkeypatch.setattr(late, "STATE_S", 0.0)
    assert not late.newer_state(pod)
    timer = threading.Timer(0.3, late.hand_over, [pod])
    timer.start()
    assert late.newer_state(pod, 30.0)
    timer.join()


def test_a_save_that_comes_further_has_not_hung(pod, monkeypatch):
    """However long it takes: a large one, on a slow volume."""
    monkeypatch.setattr(late, "PATIENCE_S", 0.2)
    monkeypatch.setattr(late, "_BEAT_S", 0.02)
    with late.saving(pod) as note:
        note.write(NAME)
        for _ in range(10):
            time.sleep(0.05)
            pulse.beat()
        assert late.in_progress(pod) == NAME
        time.sleep(0.3)
        assert late.in_progress(pod) is None
        with pytest.raises(BlockingIOError), late.saving(pod):
            pass  # another pod may try
    assert not any(it.name == "note" for it in threading.enumerate())


def test_every_chunk_that_is_written_or_read_back_is_a_beat(save, monkeypatch):
    """A save of so many has no other sign of life."""
    written, write_all = [], shard.write_all
    monkeypatch.setattr(shard, "CHUNK_BYTES", 4096)
    monkeypatch.setattr(shard, "write_all", lambda *args: (written.append(1), write_all(*args)))
    before = pulse.beats()
    assert save() == [NAME] and len(written) > 9
    assert pulse.beats() - before == 2 * len(written)


def test_what_a_process_before_has_wanted_nobody_waits_for(pod):
    """It was killed: no life is to copy a state for one that has not asked."""
    (pod / "late.more").touch()
    with late.saving(pod):
        assert not late.wants_state(pod) and late.in_progress(pod) == "" and late.relieves(pod)
    with late.saving(pod, doubtful=True):
        assert late.in_progress(pod) == "" and not late.relieves(pod)
    assert not late.relieves(pod)


class Process:
    """A process that saves, as the launcher sees it; a second one ends at once."""

    made: list["Process"] = []  # noqa: RUF012
    exitcode = 0

    def __init__(self, args, **_):
        self.made.append(self)
        self.killed, self.doubtful = False, args[-1]

    def start(self):
        pass

    def close(self):
        pass

    def is_alive(self):
        return not self.killed

    def kill(self):
        self.killed = True


@pytest.fixture
def launcher(pod, tmp_path, monkeypatch):
    monkeypatch.setattr(Process, "made", [])
    monkeypatch.setattr(rescue.multiprocessing, "get_context", lambda _: rescue.multiprocessing)
    monkeypatch.setattr(rescue.multiprocessing, "Process", Process)
    return rescue.LateSaves(None, tmp_path, pod)


def ask(launcher, pod):
    late.ask(pod)
    for _ in range(3):
        launcher.poll()
    return len(Process.made)


def test_one_that_hangs_is_replaced_in_its_own_pod(launcher, pod, monkeypatch):
    """Stopped, or on a volume that does not answer: each life may ask this very pod. One that is
    at work is left alone, however often it is asked for."""
    assert ask(launcher, pod) == 1
    with late.saving(pod) as note:
        assert ask(launcher, pod) == 1
        note.write(NAME)
        assert ask(launcher, pod) == 1 and not late.is_asked(pod)
        monkeypatch.setattr(late, "PATIENCE_S", 0.0)
        time.sleep(0.01)
        monkeypatch.setattr(Process, "exitcode", -9)
        assert ask(launcher, pod) == 2 and not late.is_asked(pod)
    Process.made[-1].killed = True
    assert ask(launcher, pod) == 3
    monkeypatch.setattr(Process, "exitcode", 0)
    Process.made[-1].killed = True
    assert ask(launcher, pod) == 4
    assert [it.doubtful for it in Process.made] == [False, True, True, False]


def test_one_that_cannot_be_made_is_no_error(launcher, pod, monkeypatch):
    """No memory for another process: the next life asks again, and the pod ends as ever."""

    def start(self):
        raise OSError

    monkeypatch.setattr(Process, "start", start)
    assert ask(launcher, pod) == 1
    launcher.stop()
