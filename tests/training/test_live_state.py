"""Training never continues from a half-done step; every rank has rank 0's unsaved records."""

import threading
from types import SimpleNamespace

import torch

from gptddp.errors import LifeLost
from gptddp.run.history import read_ledger
from gptddp.training.live_state import LiveState


def test_no_life_continues_from_a_half_done_step(run, tmp_path, monkeypatch):
    """If a peer is lost within the update of the parameters, the next life continues from the
    checkpoint."""
    assert run("--steps", "2") == 0
    real, calls = torch.optim.AdamW.step, iter(range(9))

    def half(optimizer, *args):
        if next(calls) == 2:
            raise RuntimeError("gloo: Connection closed by peer")
        return real(optimizer, *args)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", half)
        assert run("--steps", "9") == LifeLost.exit_code
    assert not [t for t in threading.enumerate() if t.name.startswith("gptddp-data")]
    assert run("--steps", "9") == 0
    starts = [event for event in read_ledger(tmp_path / "run") if event["event"] == "start"]
    assert [start["source"] for start in starts][1:] == ["step-000000000002.1"] * 2


def test_every_rank_has_the_records_of_rank_0():
    """A rank without a log keeps lines and events until they are on disk."""
    live = LiveState(SimpleNamespace(run_id="run", generation=4, step=20))
    start, found = ({"event": kind, "time": 1.0, "generation": 4} for kind in ("start", "found"))

    def kept(step: int) -> tuple[list[int], list[str]]:
        live.keep({"step": step})
        return [*live.lines], [event["event"] for event in live.events]

    live.take_over({step: {"step": step} for step in (19, 20)}, [])
    live.begun([start], 20)
    live.forget(0)
    assert kept(21) == ([19, 20, 21], ["start"])
    live.forget(20)  # they were written before the events
    assert kept(22) == ([21, 22], ["start"])
    live.forget(21)
    assert kept(23) == ([22, 23], [])
    live.keep_event(found, 23)
    live.forget(23)
    assert kept(24) == ([24], ["found"])
    live.forget(24)
    assert kept(25) == ([25], [])
