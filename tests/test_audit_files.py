"""`gptddp audit`: what it reads beside the log, and what it cannot tell."""

import json
import math
import os
import re
import shutil
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from support.audits import audit, edit, lines_of, save_again, trained
from support.rewritten_dataset import rewrite

from gptddp import cli as commands
from gptddp.checkpoint.load import load, load_newest
from gptddp.config import Config
from gptddp.data import blocks
from gptddp.data.dataset import open_dataset
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


def edit_ledger(run, event, number=0, **changes):
    """Change fields of an event; without any it is taken out."""
    lines = [json.loads(line) for line in (run / LEDGER).read_text().splitlines()]
    it = [line for line in lines if line["event"] == event][number]
    it |= changes
    if not changes:
        lines.remove(it)
    (run / LEDGER).write_text("".join(json.dumps(line) + "\n" for line in lines))


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


def test_a_run_of_very_many_steps_is_looked_through_once(tmp_path):
    """What was changed in it, and when, is found without reading all lines for each."""
    steps, configs = range(1, 200_001), {1: Config(lr=0.1), 2: Config(lr=0.1), 3: Config(lr=0.2)}
    lives = {step: 1 + (step > 100) + (step > 150_000) for step in steps}
    nothing = dict.fromkeys(["prints", "begins", "machines", "quarantine"], {})
    it = Books(
        tmp_path, dict.fromkeys(steps, {}), lives, configs=configs, left=None, wrong=[], **nothing
    )
    began = time.process_time()
    assert it.same_config(1, it.last) == 150_000
    assert it.same_config(150_001, it.last) == it.last == 200_000
    assert it.same_config(150_001, 2**31) == 2**31
    assert time.process_time() - began < 1.5


def test_a_model_that_evaluates_to_no_number(corpus, tmp_path):
    """The log has null for NaN, also where all steps have been skipped since."""
    flags = ["--lr", "1e18", "--grad-clip", "0", "--max-skipped", "9"]
    run = trained(corpus, tmp_path / "run", *flags)
    assert any("val_loss" in it and it["val_loss"] is None for it in lines_of(run)[0][1])
    code, text = audit(run, "--whole")
    assert code == 0 and "same bits: steps 1 to 8 of 8 (100%)" in text


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


def test_steps_of_a_branch_that_the_run_has_left(corpus, tmp_path):
    """Its newest checkpoint was lost, and it went on with another rate, and not as far: what the
    life before has logged beyond is named, and not counted."""
    run = trained(corpus, tmp_path / "run", "--steps", "4")
    trained(corpus, run)
    for path in run.glob("checkpoints/*.2"):
        shutil.rmtree(path)
    trained(corpus, run, "--steps", "6", "--lr", "1e-4")
    code, text = audit(run, "--whole")
    assert code == 0 and "same bits: steps 1 to 6 of 6 (100%)" in text
    assert "not counted: the log's steps from 7 on: the run has left them" in text


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


def without_state_fp(run):
    """Take it out of the line of a save in the middle of the run; the step."""
    saves = [it["step"] for _, lines in lines_of(run) for it in lines if "state_fp" in it]
    step = next(it for it in saves if it not in (5, 8))
    for log, lines in lines_of(run):
        for line in (it for it in lines if it["step"] == step):
            del line["state_fp"]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
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
    step = without_state_fp(forged)
    events = [json.loads(line) for line in (forged / LEDGER).read_text().splitlines()]
    events = [it for it in events if it.get("step") != step]
    (forged / LEDGER).write_text("".join(json.dumps(it) + "\n" for it in events))
    code, text = audit(forged, "--whole")
    assert code == 0 and "same bits: steps 1 to 8 of 8 (100%)" in text


# -- the data --------------------------------------------------------------------------------------


def test_data_that_have_been_moved(corpus, tmp_path):
    """They are read where the newest life has read them, for the steps of all lives."""
    data, there = Path(shutil.copytree(corpus, tmp_path / "data")), tmp_path / "there"
    run = trained(data, tmp_path / "run", "--steps", "4")
    data.rename(there)
    trained(there, run)
    assert audit(run, "--whole")[0] == 0
    there.rename(data)
    code, text = audit(run)
    assert code == 2 and f"--data with the data of {run}" in text
    assert audit(run, "--data", str(data))[0] == 0


def test_other_data_are_refused(honest, corpus, tmp_path):
    """From the seed too: another batch would be called a forged one."""
    other = rewrite(open_dataset(corpus), tmp_path / "other", 7)
    for flags in ((), ("--whole",)):
        code, text = audit(honest, "--data", str(other.dir), *flags)
        assert code == 2 and "is not the data that run" in text


def test_another_library_is_refused(forged):
    """From the seed too: it may encode the text otherwise."""
    data = load_newest(forged).meta["data"]
    save_again(forged, data=data | {"library": "tiktoken 0.0.1"})
    for flags in ((), ("--whole",)):
        code, text = audit(forged, *flags)
        assert code == 2 and "encoded by tiktoken 0.0.1" in text and "tiktoken==0.0.1" in text


def test_no_cache_of_rows_is_used(corpus, tmp_path):
    """It may have rows that the data have no more: a letter of a shard was changed since, and its
    size and time are as before."""
    data = rewrite(open_dataset(corpus), tmp_path / "data", 64, "none").dir
    for path in data.glob("*/*.parquet"):  # without the checksums of pages
        pq.write_table(pq.read_table(path), path, row_group_size=64, compression="none")
    manifest = json.loads((data / "dataset.json").read_text())
    for split in manifest["splits"].values():
        for file in split["files"]:
            file["bytes"] = (data / file["path"]).stat().st_size
    (data / "dataset.json").write_text(json.dumps(manifest))
    cache = tmp_path / "cache"
    run = trained(data, tmp_path / "run", "--cache-dir", str(cache))
    before = sorted(cache.rglob("*"))
    assert audit(run, "--whole")[0] == 0 and sorted(cache.rglob("*")) == before
    for path in data.glob("train/*.parquet"):
        found, content = path.stat(), path.read_bytes()
        path.write_bytes(content.replace(b"self", b"selv"))
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    code, text = audit(run, "--whole")
    assert code == 1 and ": batch_fp is " in text


def test_data_that_are_damaged_here_tell_nothing_of_the_run(corpus, tmp_path, monkeypatch):
    """A run that leaves out what it cannot read has read them."""
    monkeypatch.setattr(blocks, "RETRY_S", (0.001,))
    data = Path(shutil.copytree(corpus, tmp_path / "data"))
    run = trained(data, tmp_path / "run", "--on-bad", "quarantine")
    for path in data.glob("train/*.parquet"):
        content = bytearray(path.read_bytes())
        content[len(content) // 8 : len(content) // 2] = bytes(
            len(content) // 2 - len(content) // 8
        )
        path.write_bytes(content)
    code, text = audit(run, "--whole")
    assert code == 2 and "cannot be read here, and the run has read it for step " in text


# -- what cannot be told ---------------------------------------------------------------------------


def test_a_ledger_that_lacks_a_life(forged):
    """What it was computed on is not known; nor is that another machine."""
    edit_ledger(forged, "start", 1)
    code, text = audit(forged)
    assert code == 2 and "ledger.jsonl does not say what life 2 of" in text


def test_an_audit_is_one_process(honest, monkeypatch):
    """Under torchrun it would wait for ranks that never come."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    code, text = audit(honest)
    assert code == 2 and "an audit is one process" in text


def test_ctrl_c_is_no_difference(honest, monkeypatch):
    """Where the files are read, too: 130, as 1 would say that the run is wrong."""

    def interrupted(run):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "_run_dir", interrupted)
    assert CliRunner().invoke(commands.cli, ["audit", str(honest)]).exit_code == 130
