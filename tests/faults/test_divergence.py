"""Ranks whose states differ after a flipped bit, and gradients that are NaN."""

from collections.abc import Callable, Iterator

import pytest
import torch
from support.launchers import Training, undisturbed
from support.processes import ending
from support.same_bits import check_same_bits

from gptddp.checkpoint.load import load_newest
from gptddp.run.history import read_ledger


@pytest.fixture
def train(corpus, tmp_path) -> Iterator[Callable[..., Training]]:
    """A job that is not started yet: train(pods, slot, *flags)."""

    def make(pods: int, slot: int, *flags: str) -> Training:
        return Training(tmp_path / "job", corpus, pods, slot, pods, *flags)

    yield from ending(make, Training.close)


def test_after_a_flipped_bit_the_run_resumes_from_a_checkpoint(train, corpus, tmp_path):
    """A bit flips in a parameter, and one in the optimizer's state: the log names the pod.

    The gradients of that rank have spoilt the state of every rank, so none takes it from memory.
    In the end the run has the bits of an undisturbed run.
    """
    job = train(3, 22, "--steps", "60", "--checkpoint-every", "0.4")
    job.order(2, "flip", "25")
    job.order(1, "rot", "45")
    job.start(0, 1, 2)
    job.finish()
    events = read_ledger(job.folder)
    diverged = [event for event in events if event["event"] == "diverged"]
    assert [event["names"] for event in diverged] == [["rank 2 (pod-2)"], ["rank 1 (pod-1)"]]
    for event, at in zip(diverged, (25, 45), strict=True):
        assert at <= event["step"] < at + 10
        end, start = [e for e in events[events.index(event) :] if e["event"] in ("end", "start")][
            :2
        ]
        assert end["cause"] == f"the ranks differed: {event['names'][0]}"
        assert start["step"] < at and start["source"].startswith("step-")
    for i in range(3):
        assert "rank 2 (pod-2) differs from the rest" in job.log(i)
        assert "Traceback" not in job.log(i)
    undisturbed(tmp_path / "run", corpus, 3, 60)
    check_same_bits(job.folder, tmp_path / "run")


def test_all_ranks_skip_a_nan_and_repeated_nans_end_with_exit_code_3(train, corpus, tmp_path):
    """A NaN costs one step on every rank. Repeated ones end the job, with a good checkpoint."""
    job = train(2, 23, "--steps", "60", "--max-skipped", "3", "--checkpoint-every", "0.2")
    job.order(1, "nan", "20")
    job.order(0, "nan", "30+")
    job.start(0, 1)
    lines = job.finish(code=3)
    assert [line["step"] for line in lines if line["loss"] is None] == [20, 30, 31, 32, 33]
    assert "not finite 4 times in a row (max_skipped is 3)" in job.log(0) + job.log(1)
    assert all(event["event"] != "diverged" for event in read_ledger(job.folder))
    expected = undisturbed(tmp_path / "run", corpus, 1, 33)
    assert [line["chain_fp"] for line in lines] == [line["chain_fp"] for line in expected]
    saved = load_newest(job.folder)
    assert saved.step >= 20
    assert all(torch.isfinite(tensor).all() for tensor in saved.tensors.values())
