"""A loss or norm that is finite, but many times its usual size: reported once a streak."""

import math

import pytest

from gptddp.run.history import history, read_ledger
from gptddp.training.spikes import LEAST, WINDOW, Spikes


def spikes(losses, norms=None) -> list[tuple[int, str]]:
    """The steps at which a field begins to be too large, and the field."""
    judge, found = Spikes(), []
    norms = norms or [1.0] * len(losses)
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1):
        found += [
            (step, it["field"]) for it in judge.add({"step": step, "loss": loss, "grad_norm": norm})
        ]
    return found


USUAL = [3.0] * LEAST


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([*USUAL, 5.2, 3.0], []),  # nine times the perplexity
        ([*USUAL, 5.4, 3.0], [LEAST + 1]),  # eleven times
        ([*USUAL, 5.4, 9.0, 3.0, 8.0, *[3.0] * (WINDOW - 1), 7.0], [LEAST + 1]),  # one streak
        ([*USUAL, 5.4, *[3.0] * WINDOW, 7.0], [LEAST + 1, LEAST + WINDOW + 2]),  # two of them
        ([*USUAL, 5.4, None, None, 9.0], [LEAST + 1]),  # skipped steps end no streak
        ([*USUAL, *[9.0] * 2 * WINDOW, 10.0], [LEAST + 1]),  # a lasting size becomes usual
        ([3.0, 9.0], []),  # two steps do not give a usual size
        ([9.0] * WINDOW + [3.0] * WINDOW, []),  # a small size is no spike
    ],
)
def test_a_loss_is_reported_when_its_perplexity_is_over_ten_times_the_usual(losses, told):
    """The loss is reported once a streak; the median of the last steps is the usual one."""
    assert spikes(losses) == [(step, "loss") for step in told]


def test_a_streak_begins_with_its_first_step():
    """Of two streaks the older one counts; after both, none counts."""
    judge = Spikes()
    lines = [*USUAL, 5.4, *[3.0] * 9, 9.0]
    for step, loss in enumerate(lines, 1):
        judge.add({"step": step, "loss": loss, "grad_norm": 90.0 if step == 20 else 1.0})
    assert judge.since == LEAST + 1
    for step in range(WINDOW):
        judge.add({"step": len(lines) + step, "loss": 3.0, "grad_norm": 1.0})
    assert judge.since is None


def test_a_norm_is_reported_when_it_is_over_ten_times_the_usual():
    """The norm is reported, whatever the loss is."""
    norms = [0.5] * LEAST + [4.9, 5.1, 50.0, 0.5]
    assert spikes([3.0] * len(norms), norms) == [(LEAST + 2, "grad_norm")]


def test_a_spike_of_a_run_is_on_the_console_and_in_the_ledger(run, tmp_path, monkeypatch, caplog):
    """Console and ledger have the size and the usual one; the step is still done."""
    from gptddp import train

    forward_backward = train.forward_backward

    def spiking(ddp, batch, targets, step, *rest):
        nats = forward_backward(ddp, batch, targets, step, *rest)
        return nats * (3.0 if step in (LEAST + 2, LEAST + 3) else 1.0)

    monkeypatch.setattr(train, "forward_backward", spiking)
    assert run("--steps", str(LEAST + 6)) == 0
    lines = list(history(tmp_path / "run"))
    (spike,) = [event for event in read_ledger(tmp_path / "run") if event["event"] == "spike"]
    assert (spike["step"], spike["field"]) == (LEAST + 3, "loss")
    assert spike["value"] == lines[LEAST + 2]["loss"] and math.isclose(spike["usual"], 6, abs_tol=1)
    assert caplog.text.count(f"step {LEAST + 3}: loss is {spike['value']:.4g}, where ") == 1
    assert len(lines) == LEAST + 6


def test_a_rate_that_is_too_large_for_a_continued_run_is_reported(run, tmp_path):
    """The logs of earlier lives give the usual size: the loss need not be NaN first."""
    assert run("--steps", "20") == 0
    assert run("--steps", "30", "--lr", "30") in (0, 3)
    events = read_ledger(tmp_path / "run")
    found = [(it["generation"], it["field"]) for it in events if it["event"] == "spike"]
    assert (2, "loss") in found
