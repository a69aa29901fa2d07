"""`gptddp audit`: runs that went through something odd, and are what they say."""

import shutil

import pytest
from support.audits import audit, edit, lines_of, trained

pytestmark = pytest.mark.usefixtures("train_here")


def test_a_run_whose_evaluations_are_no_numbers(corpus, tmp_path):
    """A rate that is far too high: NaN is null in the log, and its steps are skipped. It is honest,
    and a number in the place of a null is not."""
    run = trained(corpus, tmp_path / "run", "--lr", "1e30")
    line = next(it for _, lines in lines_of(run) for it in lines if it["step"] == 3)
    assert line["loss"] is None and "val_loss" in line and line["val_loss"] is None
    code, said = audit(run, "--whole")
    assert code == 0, said
    edit(run, 3, val_loss=4.5)
    code, said = audit(run, "--whole")
    assert code == 1 and "wrong: step 3: val_loss is 4.5 in the log, and None recomputed" in said


def killed(run):
    """The newest life was killed before it could record its end."""
    *events, _ = (run / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run / "ledger.jsonl").write_text("".join(events))
    (run / "finished.json").unlink()


def test_steps_that_the_run_has_left_are_named_and_not_counted(corpus, tmp_path):
    """The second life has come to step 6, and all that it had is lost; the third, with another
    rate, to step 4 so far."""
    run = trained(corpus, tmp_path / "run", "--steps", "3")
    trained(corpus, run, "--steps", "6")
    for path in run.glob("checkpoints/step-*.2"):
        shutil.rmtree(path)
    killed(run)
    trained(corpus, run, "--steps", "4", "--lr", "1e-3")
    killed(run)
    code, said = audit(run, "--whole")
    assert code == 0 and "same bits: steps 1 to 4 of 4 (100%)" in said
    assert "not counted: the log's steps from 5 on: the run has left them" in said
