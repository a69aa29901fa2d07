"""A run that ends by tokens or time, with the trainer: its last step, its rates, its marker."""

import dataclasses
import itertools
import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import ledgers

from gptddp.checkpoint import run_state
from gptddp.checkpoint.run_state import configuration
from gptddp.config import Config
from gptddp.errors import LifeLost
from gptddp.model.schedule import lr_at
from gptddp.run.history import history, logged, read_ledger
from gptddp.training import life, quarantine

TIME = ("--steps", "1000", "--max-time", "7.5", "--eval-every", "100000")  # of 10 steps
TOKENS = ("--steps", "1000", "--max-tokens", "2000", "--eval-every", "100000")


@pytest.fixture
def clock(monkeypatch):
    """Each step takes 0.5 s, after a wait of 0.25 s for its rows."""
    ticks, next_batch = itertools.count(), quarantine.next_batch
    fake = SimpleNamespace(monotonic=lambda: 0.5 * next(ticks), time=time.time)
    monkeypatch.setattr(life, "time", fake)

    def waited_for(*args):
        return dataclasses.replace(next_batch(*args), wait_s=0.25)

    monkeypatch.setattr(quarantine, "next_batch", waited_for)


def log(folder: Path) -> list[dict[str, Any]]:
    return list(history(folder / "run"))


def rates(folder: Path) -> list[float]:
    """The learning rate of every step, from log and configuration only."""
    config, lines = configuration(folder / "run"), log(folder)
    tokens = [0, *(line["tokens"] for line in lines)]
    return [
        lr_at(line["step"] - 1, config, used, line.get("train_s", 0.0))
        for line, used in zip(lines, tokens, strict=False)
    ]


def check_ended(folder: Path, cause: str, step: int) -> None:
    """The last step is evaluated, checked, saved and marked like the last of `steps`."""
    lines = log(folder)
    assert [line["step"] for line in lines] == list(range(1, step + 1))
    assert {"val_loss", "val_bpb", "state_fp"} <= lines[-1].keys()
    marker = json.loads((folder / "run/finished.json").read_text())
    assert (marker["cause"], marker["step"], marker["tokens"]) == (cause, step, lines[-1]["tokens"])
    (manifest,) = (folder / "run/checkpoints").glob(f"step-{step:012}.*/manifest.json")
    assert json.loads(manifest.read_text())["meta"]["state_fp"] == lines[-1]["state_fp"]
    assert cause in run_state.why_finished(Config(run_dir=str(folder / "run")))


def test_time_ends_a_run_as_steps_would(run, tmp_path, clock):
    """The rate follows the time, waits for data included, and the log has that time. The last step
    is evaluated, checked and saved; the same command does no more."""
    assert run(*TIME) == 0
    check_ended(tmp_path, "max_time", 10)
    lines = log(tmp_path)
    assert [line["train_s"] for line in lines] == [0.75 * n for n in range(10)]
    assert ["val_loss" in line for line in lines] == [False] * 9 + [True]
    assert [line["lr"] for line in lines] == rates(tmp_path)
    peak = configuration(tmp_path / "run").lr
    assert lines[2]["lr"] == peak and 0.1 * peak < lines[-1]["lr"] < 0.15 * peak
    assert run(*TIME) == 0 and log(tmp_path) == lines


def test_readers_see_when_time_will_end_the_run(run, tmp_path, clock, caplog):
    """The log has the expected last step and the remaining seconds. Each evaluation appears once,
    also if the last step was evaluated before it was known to be the last."""
    caplog.set_level(logging.INFO)
    assert run(*TIME, "--log-every", "4", "--eval-every", "5") == 0
    check_ended(tmp_path, "max_time", 10)
    assert caplog.text.count("step 10: validation loss") == 1
    told = [it.getMessage() for it in caplog.records if " tok/s " in it.getMessage()]
    assert [line.split()[1] for line in told] == ["1/~10", "4/~10", "8/~10", "10/~10"]
    assert [line.split("  ")[5] for line in told[1:]] == ["ETA 4 s", "ETA 1 s", "ETA 0 s"]


def test_a_rank_uses_the_agreed_time_and_not_its_own_clock(run, tmp_path, monkeypatch):
    """Rank 0's time decides the rates and the end: here half a second a step."""
    agree, said = life.agree, itertools.count()

    def from_rank_0(*args):
        return dataclasses.replace(agree(*args), train_s=0.5 * next(said))

    monkeypatch.setattr(life, "agree", from_rank_0)
    assert run(*TIME) == 0
    check_ended(tmp_path, "max_time", 15)
    assert [line["lr"] for line in log(tmp_path)] == rates(tmp_path)


def test_more_time_computes_the_schedule_again(run, tmp_path, clock):
    """The rate of the next step rises; the run ends like a run with all the time from the start."""
    assert run(*TIME) == 0
    assert run(*TIME, "--max-time", "15") == 0
    check_ended(tmp_path, "max_time", 20)
    found, wanted = [line["lr"] for line in log(tmp_path)], rates(tmp_path)
    assert found[10:] == wanted[10:] and found[3:10] != wanted[3:10]
    assert found[10] > found[9]


def test_tokens_end_a_run_as_steps_would(run, tmp_path):
    """The rate follows the tokens; the run ends when all are used, and more tokens continue it."""
    assert run(*TOKENS) == 0
    lines = log(tmp_path)
    check_ended(tmp_path, "max_tokens", len(lines))
    assert lines[-2]["tokens"] < 2000 <= lines[-1]["tokens"]
    assert "train_s" not in lines[-1]  # the rate is a function of step and tokens
    assert [line["lr"] for line in lines] == rates(tmp_path)
    assert lines[-1]["lr"] < 0.2 * configuration(tmp_path / "run").lr
    assert run(*TOKENS) == 0 and log(tmp_path) == lines
    assert run(*TOKENS, "--max-tokens", "3000") == 0
    check_ended(tmp_path, "max_tokens", len(log(tmp_path)))


@pytest.mark.parametrize("what", ["evaluate", "check_replicas"])
def test_after_a_loss_at_the_end_of_the_time_the_next_life_completes_the_last_step(
    run, tmp_path, clock, monkeypatch, what
):
    """If a life is killed after the agreement, in the evaluation or the check of the last step, the
    next life completes both, and does no other step."""
    working, over = getattr(life, what), []
    agree = life.agree

    def noting(*args):
        agreed = agree(*args)
        over.append(agreed.train_s >= 7.5)
        return agreed

    def lost(*args):
        if over and over[-1]:
            raise RuntimeError("gloo: Connection closed by peer")
        return working(*args)

    with monkeypatch.context() as patch:
        patch.setattr(life, "agree", noting)
        patch.setattr(life, what, lost)
        patch.setattr("gptddp.distributed.lost.ROLL_CALL_S", 0.0)
        assert run(*TIME) == LifeLost.exit_code
    assert not {"val_loss", "state_fp"} & log(tmp_path)[-1].keys()
    assert not (tmp_path / "run/finished.json").exists()
    assert run(*TIME) == 0
    check_ended(tmp_path, "max_time", 10)
    start = [event for event in read_ledger(tmp_path / "run") if event["event"] == "start"][-1]
    assert (start["source"], start["step"], start["redo"]) == ("scratch", 0, 10)


def test_steps_that_a_slower_life_did_not_repeat_are_not_in_the_run(tmp_path):
    """The second life reached step 8. The third continued from step 4, and its time was used up
    after step 6: the log ends there, and continues from there."""
    stop = {"event": "stop", "generation": 3, "step": 6, "cause": "max_time"}
    ledgers.begun(tmp_path, {}, stop)
    for life_, steps in ((1, (1, 2, 3, 4)), (2, (5, 6, 7, 8)), (3, (5, 6)), (4, (7, 8))):
        assert life_ < 4 or [it for it, _ in logged(tmp_path)] == [1] * 4 + [3] * 2
        lines = (json.dumps({"step": step}) + "\n" for step in steps)
        (tmp_path / f"log.{life_}.jsonl").write_text("".join(lines))
    assert [it for it, _ in logged(tmp_path)] == [1] * 4 + [3] * 2 + [4] * 2
