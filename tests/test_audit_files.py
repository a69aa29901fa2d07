"""`gptddp audit`: what it reads beside the lines of the log."""

import dataclasses
import json
import math
import re
import shutil
import time
from pathlib import Path

import pytest
from support.audits import audit, edit, edit_ledger, lines_of, save_again, trained

from gptddp.checkpoint.load import load
from gptddp.config import Config
from gptddp.run import books
from gptddp.run.books import Books
from gptddp.run.directory import CONFIG, FINISHED, LEDGER

pytestmark = pytest.mark.usefixtures("train_here")
OTHER = "0123456789abcdef"


@pytest.fixture(scope="module")
def honest(corpus, tmp_path_factory):
    """A run of eight steps in two lives."""
    run = trained(corpus, tmp_path_factory.mktemp("audit") / "run", "--steps", "5")
    return trained(corpus, run)


@pytest.fixture
def forged(honest, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(honest, tmp_path / "forged"))


def leave_newest(run):
    """Delete all checkpoints but that of the end."""
    for path in run.glob("checkpoints/step-00000000000[1-7].*"):
        shutil.rmtree(path)


def test_what_an_audit_begins_with_is_compared_with_the_log(forged):
    """A run that keeps its last checkpoint alone: none of its steps is recomputed, which is no
    answer (exit code 2); but that checkpoint is the state that the log says, or it is wrong."""
    leave_newest(forged)
    code, text = audit(forged)
    assert code == 2 and "nothing recomputed" in text and "give --whole" in text
    save_again(forged, tokens=7)
    code, text = audit(forged)
    assert code == 1 and "wrong: step 8: tokens is " in text
    assert "in the log, and 7 in step-000000000008.2" in text


def test_the_ledger_is_compared_too(forged):
    """At steps of which the log has no `state_fp`, and where the run began."""
    for log, lines in lines_of(forged):
        for line in (it for it in lines if it["step"] == 5):
            del line["state_fp"]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for path in forged.glob("checkpoints/step-000000000005.*"):
        shutil.rmtree(path)
    edit_ledger(forged, "start", 1, state_fp=OTHER)
    code, text = audit(forged, "--whole")
    assert code == 1 and "wrong: step 5: state_fp is " in text
    edit_ledger(forged, "start", 0, state_fp=OTHER)
    code, text = audit(forged, "--whole")
    assert code == 1 and f"wrong: step 0: state_fp is '{OTHER}' in ledger.jsonl" in text


@pytest.mark.parametrize(
    ("name", "old", "new", "what"),
    [
        (CONFIG, '"lr": ', '"lr": 1', "config.json is not as the trainer has written it"),
        (CONFIG, '"run_id": "', '"run_id": "x', "config.json and .*ledger.jsonl are of different"),
        (CONFIG, '"config"', '"conf"', "config.json cannot be used"),
        (FINISHED, '"tokens": ', '"tokens": 1', "finished.json has 1\\d+ tokens, and the log "),
        (FINISHED, '"tokens": ', "", "finished.json is not valid JSON"),
    ],
)
def test_files_that_do_not_say_what_log_and_ledger_do(forged, name, old, new, what):
    """They are named, though every step is as the log has it."""
    text = (forged / name).read_text()
    (forged / name).write_text(text.replace(old, new, 1))
    code, text = audit(forged, "--whole")
    assert code == 1 and "same bits: steps 1 to 8 of 8 (100%)" in text
    assert any(line.startswith("wrong: ") for line in text.splitlines())
    assert re.search(what, text)


def test_a_number_is_of_its_own_kind(forged):
    """7.0 is not 7, though they are equal."""
    edit(forged, 4, tokens=float)
    code, text = audit(forged, "--whole")
    assert code == 1 and "wrong: step 4: tokens is " in text


@pytest.mark.parametrize("value", ["x", [1], None, -1.0, math.inf])
def test_seconds_of_a_line_that_none_can_be(forged, value):
    """A rate cannot follow from them."""
    edit(forged, 6, train_s=value)
    code, text = audit(forged)
    assert code == 1 and "wrong: step 6: train_s is " in text and "to 5 of 8" in text


@pytest.mark.parametrize("step", [0, -3, 10**12, 2**31 - 2])
def test_a_line_of_a_step_that_cannot_be(forged, step):
    """It is named, and not waited for."""
    for log, lines in lines_of(forged):
        lines = [it | {"step": step} if it["step"] == 3 else it for it in lines]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    began = time.monotonic()
    code, text = audit(forged, "--whole")
    assert code == 1 and "wrong: step 3: it is not in the log" in text
    assert time.monotonic() - began < 20


@pytest.mark.alone
def test_a_run_of_very_many_steps_is_looked_through_once(tmp_path):
    """What was changed in it, and when, is found without reading all lines for each."""
    steps, configs = range(1, 200_001), {1: Config(lr=0.1), 2: Config(lr=0.1), 3: Config(lr=0.2)}
    lives = {step: 1 + (step > 100) + (step > 150_000) for step in steps}
    nothing = dict.fromkeys(["prints", "begins", "machines", "codes", "quarantine"], {})
    it = Books(
        tmp_path, dict.fromkeys(steps, {}), lives, configs=configs, left=None, wrong=[], **nothing
    )
    began = time.process_time()
    assert it.same_config(1, it.last) == 150_000
    assert it.same_config(150_001, it.last) == it.last == 200_000
    assert it.same_config(150_001, 2**31) == 2**31
    assert time.process_time() - began < 1.5


def test_checkpoints_that_a_run_deletes_while_it_is_audited(forged, monkeypatch):
    """They are named, and nothing is wrong; the oldest may go as well."""

    def deleting(path, *args):
        if "-000000000008." not in path.name:
            shutil.rmtree(path)
        return load(path, *args)

    monkeypatch.setattr("gptddp.audit.load", deleting)
    code, text = audit(forged, "--whole")
    assert code == 0 and "same bits: steps 1 to 8 of 8 (100%)" in text
    assert "not counted: step-000000000005.1: it has been deleted meanwhile" in text
    code, text = audit(forged)
    assert code == 2 and "nothing recomputed" in text


def test_a_run_that_goes_on_while_its_files_are_read(forged, tmp_path, monkeypatch):
    """A checkpoint that is newer than what was read of the log is none of the audit's."""
    for log, lines in lines_of(forged):
        log.write_text("".join(json.dumps(it) + "\n" for it in lines if it["step"] <= 6))
    events = [json.loads(line) for line in (forged / LEDGER).read_text().splitlines()]
    events = [it for it in events if it["step"] <= 6 and it["event"] != "recovered"]
    (forged / LEDGER).write_text("".join(json.dumps(it) + "\n" for it in events))
    newest = next(forged.glob("checkpoints/*8.2")).rename(tmp_path / "step-000000000008.2")
    for path in forged.glob("checkpoints/*7.2"):
        shutil.rmtree(path)

    def then_it_saves(run, fields, read=books.read):
        found = read(run, fields)
        newest.rename(run / "checkpoints" / newest.name)
        return found

    monkeypatch.setattr(books, "read", then_it_saves)
    code, text = audit(forged, "--whole")
    assert code == 0 and "same bits: steps 1 to 6 of 6 (100%)" in text


def without_state_fp(run, events=False):
    """Take it out of the line of a save in the middle of the run; the step.

    `events`: and what the ledger has of it.
    """
    saves = [it["step"] for _, lines in lines_of(run) for it in lines if "state_fp" in it]
    step = next(it for it in saves if it not in (5, 8))
    for log, lines in lines_of(run):
        for line in (it for it in lines if it["step"] == step):
            del line["state_fp"]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if events:
        kept = [json.loads(line) for line in (run / LEDGER).read_text().splitlines()]
        kept = [it for it in kept if it.get("step") != step]
        (run / LEDGER).write_text("".join(json.dumps(it) + "\n" for it in kept))
    return step


def test_a_save_whose_checkpoint_is_gone(forged):
    """The ledger has the state after it, and the log has it no more."""
    step = without_state_fp(forged)
    shutil.rmtree(forged / "checkpoints")
    assert audit(forged, "--whole")[0] == 0
    events = [json.loads(line) for line in (forged / LEDGER).read_text().splitlines()]
    number = [it["step"] for it in events if it["event"] == "checkpoint"].index(step)
    edit_ledger(forged, "checkpoint", number, state_fp=OTHER)
    code, text = audit(forged, "--whole")
    assert code == 1 and f"wrong: step {step}: state_fp is '{OTHER}' in ledger.jsonl" in text


def test_a_checkpoint_of_whose_state_the_log_says_nothing(forged):
    """As of a late save: its state is compared all the same."""
    without_state_fp(forged, events=True)
    code, text = audit(forged, "--whole")
    assert code == 0 and "same bits: steps 1 to 8 of 8 (100%)" in text


def test_a_checkpoint_that_lacks_a_tensor(forged, monkeypatch):
    """It is not the model's, and the audit begins with it: exit code 1, not that of a start."""
    step = without_state_fp(forged, events=True)

    def lacking(*args):
        loaded = load(*args)
        tensors = {k: v for k, v in loaded.tensors.items() if k != "sums.exponents"}
        meta = {k: v for k, v in loaded.meta.items() if k != "state_fp"}
        return dataclasses.replace(loaded, tensors=tensors, meta=meta)

    monkeypatch.setattr("gptddp.audit.load", lacking)
    for path in forged.glob("checkpoints/step-*"):
        if int(path.name.split(".")[0][5:]) < step:
            shutil.rmtree(path)
    code, text = audit(forged)
    assert code == 1 and f"wrong: step {step}: " in text and "sums.exponents" in text
