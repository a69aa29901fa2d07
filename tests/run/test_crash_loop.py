"""Errors of the trainer that count, and when they stop counting."""

import json

import pytest

from gptddp.run import crash_loop


def fail(run, step, generation, rank=0, text="broken"):
    """The verdict on an error in this step."""
    try:
        raise ValueError(text)
    except ValueError as error:
        return crash_loop.final(
            error, run, step=step, generation=generation, rank=rank, pod=f"pod-{rank}"
        )


def log(run, generation, *steps):
    lines = [json.dumps({"step": step, "time": 1.0}) for step in steps]
    (run / f"log.{generation}.jsonl").write_text("\n".join(lines) + "\n")


def test_the_third_life_that_fails_at_a_step_is_the_last(tmp_path, capsys):
    """Lives are counted, not ranks. The message names the rank that failed first, with its pod."""
    assert fail(tmp_path, 7, 1, rank=0) is None
    assert fail(tmp_path, 7, 1, rank=1) is None
    assert fail(tmp_path, 7, 2, rank=1) is None
    assert fail(tmp_path, 7, 4, rank=3, text="the\nfirst") is not None
    verdict = fail(tmp_path, 7, 4, rank=2, text="the second")
    assert verdict.exit_code == 5
    assert str(verdict) == (
        "step 7 failed 3 times with an error of the trainer, the last time on rank 3 "
        "(pod-3): ValueError: the first"
    )
    assert "[rank 2] Traceback" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "is_final"),
    [((7, 7, 7), True), ((6, 7, 8), True), ((2, 7, 8), False), ((7, 7, 30), False)],
)
def test_failures_count_together_if_the_run_came_no_further(tmp_path, steps, is_final):
    """Peers may have finished a step or two in a life; after more it is another fault."""
    verdicts = [fail(tmp_path, step, life) for life, step in enumerate(steps, 1)]
    assert verdicts[:2] == [None, None] and (verdicts[2] is not None) == is_final


def test_faults_that_a_later_life_passed_no_longer_count(tmp_path):
    """This holds even if the run then goes back to a checkpoint."""
    assert fail(tmp_path, 7, 1) is None and fail(tmp_path, 7, 2) is None
    log(tmp_path, 1, *range(1, 7))
    log(tmp_path, 3, *range(5, 20))
    assert fail(tmp_path, 7, 4) is None
    assert fail(tmp_path, 7, 5) is None
    assert fail(tmp_path, 7, 6) is not None


def test_the_system_and_a_full_disk_are_no_faults_of_the_trainer(tmp_path):
    """An OSError never counts, and nothing counts if the record cannot be written."""
    for life in range(5):
        assert (
            crash_loop.final(OSError(), tmp_path, step=1, generation=life, rank=0, pod="") is None
        )
        assert fail(tmp_path / "gone", 1, life) is None
    assert not list(tmp_path.iterdir())


def test_errors_before_the_first_life_are_forgotten_when_it_begins(tmp_path):
    """Errors at the start count until the first life begins."""
    assert fail(tmp_path, 0, 0) is None and fail(tmp_path, 0, 1) is None
    crash_loop.forget(tmp_path)
    assert fail(tmp_path, 0, 2) is None and fail(tmp_path, 0, 3) is None
    assert str(fail(tmp_path, 0, 4)).startswith("the start, before the first step, failed 3")


def test_a_damaged_record_does_not_hide_the_error(tmp_path):
    """If a record is damaged, the message is of the rank that failed last."""
    assert fail(tmp_path, 7, 1) is None and fail(tmp_path, 7, 2) is None
    for text in ("{", "[]", "{}"):
        (tmp_path / "faults/7.3.9.json").write_text(text)
        assert "ValueError: broken" in str(fail(tmp_path, 7, 3))
    assert crash_loop.first(tmp_path, 8) is None
