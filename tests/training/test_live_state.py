"""A state is handed on only when it is whole: in memory, between processes, and within one."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from gptddp.checkpoint import snapshot
from gptddp.errors import LifeLost
from gptddp.run.history import read_ledger
from gptddp.run.progress import Progress
from gptddp.training.live_state import LiveState


def test_a_step_that_is_half_done_is_not_handed_on(run, tmp_path, monkeypatch):
    """A peer that is lost between the first parameter and the last leaves no snapshot: the next
    life goes on from the checkpoint."""
    assert run("--steps", "2") == 0
    real, calls = torch.optim.AdamW.step, iter(range(9))

    def half(optimizer, *args):
        if next(calls) == 2:
            raise RuntimeError("gloo: Connection closed by peer")
        return real(optimizer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", half)
        assert run("--steps", "9") == LifeLost.exit_code
    assert not list((tmp_path / "memory").iterdir())
    assert not [t for t in threading.enumerate() if t.name.startswith("gptddp-data")]
    assert run("--steps", "9") == 0
    starts = [event for event in read_ledger(tmp_path / "run") if event["event"] == "start"]
    assert [start["source"] for start in starts][1:] == ["step-000000000002.1"] * 2


def test_a_step_waits_for_the_snapshot_that_is_being_left(tmp_path, monkeypatch):
    """The watchdog leaves one while the loop comes back from a hang: it is of one step."""
    write, begun = snapshot.write, threading.Event()

    def slowly(*args, **kwargs):
        begun.set()
        time.sleep(0.3)
        return write(*args, **kwargs)

    monkeypatch.setattr(snapshot, "write", slowly)
    tensors = {"w": torch.zeros(4)}
    origin, spent = (
        SimpleNamespace(run_id="r", generation=1),
        SimpleNamespace(by_phase=dict, since_s=0.0),
    )
    live = LiveState(Path(tmp_path, "left"), origin, spent)
    live.mark_whole(tensors, Progress(step=3))
    watchdog = threading.Thread(target=live.leave_snapshot, args=("a stop",))
    watchdog.start()
    assert begun.wait(10)
    live.mark_changing()
    tensors["w"] += 1
    watchdog.join()
    left = snapshot.read(tmp_path / "left")
    assert left is not None and left.step == 3 and left.tensors["w"].tolist() == [0.0] * 4
