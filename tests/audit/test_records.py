"""`gptddp audit` checks checkpoints, ledger and copies, not only the lines of the log."""

import dataclasses
import json
import shutil

import pytest
from support.audits import audit, change_lines, edit_events, edit_json, lines_of, save_again

from gptddp.audit import Audit
from gptddp.checkpoint.load import load
from gptddp.run import audited
from gptddp.run.directory import CONFIG, DATASET, FINISHED, LEDGER

pytestmark = pytest.mark.usefixtures("train_here")
OTHER = "0123456789abcdef"


def leave_newest(run):
    """Delete all checkpoints except the last one."""
    for path in run.glob("checkpoints/step-00000000000[1-7].*"):
        shutil.rmtree(path)


def test_a_single_checkpoint_is_compared_with_the_log(forged):
    """If only the last checkpoint exists, no step is recomputed (exit code 2), but a checkpoint
    that differs from the log is an error."""
    leave_newest(forged)
    code, text = audit(forged)
    assert code == 2 and "nothing recomputed" in text and "give --whole" in text
    save_again(forged, tokens=7)
    code, text = audit(forged)
    assert code == 1 and "wrong: step 8: tokens is " in text
    assert "in the log, but 7 in step-000000000008.2" in text


def in_json(name, **changes):
    return lambda run: edit_json(run, name, **changes)


def in_events(*kinds, which=slice(None), **changes):
    return lambda run: edit_events(run, *kinds, which=which, **changes)


def torn(name):
    return lambda run: (run / name).write_text('{"tokens": }')


def a_folder(name):
    def forge(run):
        (run / name).unlink()
        (run / name).mkdir()

    return forge


FIRST, SAVES = slice(1), slice(1, None)  # the last save of a life is followed by its stop
RECOMPUTED = {  # found where their step is recomputed
    "batch_fp of saves and stops": (in_events("checkpoint", "stop", batch_fp=OTHER), "batch_fp"),
    "batch_fp of one stop": (in_events("stop", which=FIRST, batch_fp=OTHER), "batch_fp"),
    "state_fp of the first start": (
        in_events("start", which=FIRST, state_fp=OTHER),
        f"step 0: state_fp is '{OTHER}' in ledger.jsonl, but '",
    ),
    "state_fp of the second start": (
        in_events("start", which=SAVES, state_fp=OTHER),
        f"step 5: state_fp is '{OTHER}' in ledger.jsonl, but '",
    ),
    "state_fp of a start that is no hash": (in_events("start", state_fp="zz"), "state_fp is 'zz'"),
    "state_fp of one stop that is no hash": (in_events("stop", state_fp=[1]), "state_fp"),
    "chain_fp that is a number": (in_events("checkpoint", chain_fp=5), "chain_fp"),
    "tokens of the last stop": (in_events("stop", tokens=3, results=[1]), "tokens is 3 in ledger"),
    "what has come out of it": (
        in_events("stop", which=SAVES, results={"val_bpb": 0.5}),
        "val_bpb is 0.5 in ledger.jsonl",
    ),
}
READ = {  # found when the records are read
    "what a start redoes": (
        in_events("start", which=FIRST, redo=5),
        "the start of life 1 does not match its hash",
    ),
    "step of a save that is none": (
        in_events("checkpoint", which=FIRST, step="x"),
        "the checkpoint of life 1 has the step 'x'",
    ),
    "step of a stop that is none": (in_events("stop", step=[1]), "of life 1 has the step [1]"),
    "saves taken out": (in_events("checkpoint"), "lacks the checkpoint event of step-0000000000"),
    "one save taken out": (
        in_events("checkpoint", which=FIRST),
        "lacks the checkpoint event of step-000000000001.1, but has later events",
    ),
    "step of the marker": (in_json(FINISHED, step=7), "finished.json has step 7, but the ledger 8"),
    "a save that is said to have failed": (
        in_events("checkpoint", which=FIRST, error="x"),
        "lacks the checkpoint event of step-000000000001.1",
    ),
    "run of the marker": (in_json(FINISHED, run_id="other"), "finished.json has run_id 'other'"),
    "life of the marker": (in_json(FINISHED, generation=[7]), "has no stop of it"),
    "the run's last stop": (in_events("stop", which=SAVES), "ledger.jsonl has no stop of it"),
    "a torn marker": (torn(FINISHED), "finished.json is not valid JSON"),
    "rate of the copy": (in_json(CONFIG, lr=0.5), "config.json has lr 0.5, but the ledger"),
    "run of the copy": (in_json(CONFIG, run_id="other"), "config.json has run_id 'other'"),
    "life of the copy": (in_json(CONFIG, generation="x"), "config.json is of life 'x'"),
    "no configuration in the copy": (in_json(CONFIG, config=[]), "is not a JSON object"),
    "a torn copy": (torn(CONFIG), "config.json is not valid JSON"),
    "hash of the data": (in_json(DATASET, sha256="x"), "dataset.json has sha256 'x', but"),
    "a folder in the place of a copy": (a_folder(CONFIG), "config.json"),
}


def assert_found(run, forgeries, what, *flags):
    """Forge the run, and assert that an audit lists this finding."""
    forge, wanted = forgeries[what]
    forge(run)
    code, text = audit(run, *flags)
    wrong = [line for line in text.splitlines() if line.startswith("wrong: ")]
    assert code == 1 and any(wanted in line for line in wrong), text


@pytest.mark.parametrize("what", RECOMPUTED)
def test_changed_fingerprints_in_the_ledger_are_found(forged, what):
    """A replaced fingerprint, count or result is found, though the log is right."""
    assert_found(forged, RECOMPUTED, what, "--whole")


@pytest.mark.parametrize("what", READ)
def test_changes_in_ledger_and_copies_are_found(forged, monkeypatch, what):
    """A replaced value, garbage, and a removed event are found without recomputing a step."""
    monkeypatch.setattr(Audit, "compare", lambda *_: None)
    assert_found(forged, READ, what)


def test_missing_records_of_a_killed_run_are_no_difference(forged):
    """The copies, the last save of a killed life and its stop may be missing in the ledger; any
    other save of a life may not."""
    events = [json.loads(line) for line in (forged / LEDGER).read_text().splitlines()]
    saves = [it for it in events if it["event"] == "checkpoint"]
    unseen = [it for it in saves if it["step"] == 5 or 5 < it["step"] < 8]
    unseen += [it for it in events if it["event"] == "stop" and it["generation"] == 1]
    kept = (json.dumps(it) + "\n" for it in events if it not in unseen)
    (forged / LEDGER).write_text("".join(kept))
    code, text = audit(forged)
    assert code == 1 and "lacks the checkpoint event of" in text  # of the second life
    save_again(forged, parent="step-000000000005.1")
    (forged / CONFIG).unlink()
    (forged / FINISHED).unlink()
    code, text = audit(forged)
    assert code == 0 and " to 8 of 8" in text, text


def test_checkpoints_that_a_run_deletes_while_it_is_audited(forged, monkeypatch):
    """A checkpoint that is deleted during the audit is listed, but is not an error."""

    def deleting(path, *args):
        if "-000000000008." not in path.name:
            shutil.rmtree(path)
        return load(path, *args)

    monkeypatch.setattr("gptddp.audit.load", deleting)
    code, text = audit(forged, "--whole")
    assert code == 0 and "same bits: steps 1 to 8 of 8 (100%)" in text
    assert "not counted: step-000000000005.1: it was deleted during the audit" in text
    code, text = audit(forged)
    assert code == 2 and "nothing recomputed" in text


def test_a_run_that_saves_during_its_audit(forged, tmp_path, monkeypatch):
    """A checkpoint newer than the log that was read is ignored."""
    change_lines(forged, lambda line: line if line["step"] <= 6 else None)
    events = [json.loads(line) for line in (forged / LEDGER).read_text().splitlines()]
    events = [it for it in events if it["step"] <= 6]
    (forged / LEDGER).write_text("".join(json.dumps(it) + "\n" for it in events))
    (forged / FINISHED).unlink()
    newest = next(forged.glob("checkpoints/*8.2")).rename(tmp_path / "step-000000000008.2")
    for path in forged.glob("checkpoints/*7.2"):
        shutil.rmtree(path)

    def then_it_saves(run, fields, read=audited.read):
        found = read(run, fields)
        newest.rename(run / "checkpoints" / newest.name)
        return found

    monkeypatch.setattr(audited, "read", then_it_saves)
    code, text = audit(forged, "--whole")
    assert code == 0 and "same bits: steps 1 to 6 of 6 (100%)" in text


def without_state_fp(run, events=False):
    """Remove state_fp from the log line of a save in the middle of the run, and return its step.

    `events`: remove it from the ledger too.
    """
    saves = [it["step"] for _, lines in lines_of(run) for it in lines if "state_fp" in it]
    step = next(it for it in saves if it not in (5, 8))
    change_lines(
        run,
        lambda it: {k: v for k, v in it.items() if k != "state_fp"} if it["step"] == step else it,
    )
    if events:
        edit_events(run, "checkpoint", "stop", state_fp=None)
    return step


def test_a_save_whose_checkpoint_is_gone(forged):
    """A save's state_fp in the ledger is checked without its checkpoint and its log entry."""
    step = without_state_fp(forged)
    shutil.rmtree(forged / "checkpoints")
    assert audit(forged, "--whole")[0] == 0
    edit_events(forged, "checkpoint", state_fp=OTHER)
    code, text = audit(forged, "--whole")
    assert code == 1 and f"wrong: step {step}: state_fp is '{OTHER}' in ledger.jsonl" in text


def test_a_checkpoint_that_lacks_a_tensor(forged, monkeypatch):
    """An audit that begins with such a checkpoint gives exit code 1, not that of a failed start."""
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
