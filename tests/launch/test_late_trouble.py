"""Late saves: machines that see files late."""

import dataclasses

import pytest
from support.late_saves import NAME
from support.trainer_patches import lose_a_peer

from gptddp.checkpoint import late
from gptddp.launch import rescue
from gptddp.run import history
from gptddp.run.history import log_path
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
        monkeypatch.setattr(LiveState, "leave_snapshot", lambda self, cause: self.copy())
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
