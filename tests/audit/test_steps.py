"""`gptddp audit` confirms the bits of an honest run, and finds a forged step."""

import itertools
import json
import math
import random
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.audits import audit, change_lines, edit, edit_events, lines_of, save_again, trained
from support.prepared import flip
from support.rewritten_dataset import rewrite
from support.waiting_writer import Writer

from gptddp.checkpoint import run_state
from gptddp.checkpoint.load import load_newest
from gptddp.data import blocks, lanes
from gptddp.distributed import hardware
from gptddp.distributed.replicas import state_fp
from gptddp.prepare.build import prepare
from gptddp.prepare.recipe import Settings
from gptddp.run.history import read_ledger
from gptddp.training import life
from gptddp.training.replay import Replay

pytestmark = pytest.mark.usefixtures("train_here")


def test_an_honest_run_is_the_same_bits(honest):
    """All steps from the seed, over a change of the rate, or from the first checkpoint, match. No
    file of the run changes."""
    before = {path: path.stat().st_mtime_ns for path in honest.rglob("*")}
    code, text = audit(honest, "--whole")
    assert code == 0 and "same bits: steps 1 to 8 of 8 (100%)" in text
    assert {path: path.stat().st_mtime_ns for path in honest.rglob("*")} == before
    code, text = audit(honest)
    assert code == 0 and " to 8 of 8 (" in text and "times, speeds" in text


def up(value):
    """The next float: one bit more."""
    return math.nextafter(value, math.inf)


def without(run, *steps):
    change_lines(run, lambda line: None if line["step"] in steps else line)


def renumbered(run, steps):
    """Give lines other steps."""
    change_lines(run, lambda line: line | {"step": steps.get(line["step"], line["step"])})


FIELDS = {"batch_fp", "chain_fp", "tokens", "lr", "loss", "grad_norm"}
FIELDS |= {"val_loss", "val_bpb", "state_fp"}


def other(value):
    """Another value of the same type, for a float the next one."""
    if isinstance(value, str):
        return "0123456789abcdef"
    return value + 1 if isinstance(value, int) else up(value)


def test_one_changed_bit_of_any_field_is_found(honest, monkeypatch):
    """At each step, a change of any field of the line is found, as is another type."""
    record, found = Replay.record, set()

    def forging(replay):
        lines, step = replay._span.lines, replay.step
        line = lines[step]
        changes = {name: other(value) for name, value in line.items() if name != "train_s"}
        for name, value in [*changes.items(), ("tokens", float(line["tokens"]))]:
            lines[step] = line | {name: value}
            record(replay)
            assert str(replay.wrong).startswith(f"step {step}: {name} is {value!r} in the log")
            found.add(name)
        lines[step] = line
        record(replay)

    monkeypatch.setattr(Replay, "record", forging)
    assert audit(honest, "--whole")[0] == 0 and found == FIELDS


LOG = [  # the forgery, the first wrong step, and its message
    (lambda run: edit(run, 3, loss=up), 3, "loss is"),
    (lambda run: edit(run, 4, val_bpb=3.0), 4, "val_bpb is"),  # the step was not evaluated
    (lambda run: edit(run, 4, loss=None, grad_norm=None), 4, "loss is None"),  # as if skipped
    *(
        (lambda run, value=value: edit(run, 6, train_s=value), 6, "train_s is")
        for value in ("x", None, -1.0, math.inf)
    ),
    (lambda run: without(run, 7, 8), 7, "it is not in the log"),
    (lambda run: renumbered(run, {3: 4, 4: 3}), 3, "batch_fp is"),
    *(
        (lambda run, step=step: renumbered(run, {3: step}), 3, "it is not in the log")
        for step in (-3, 10**12, 2**31 - 2)
    ),
]


@pytest.mark.parametrize("number", range(len(LOG)))
def test_a_forged_line_of_the_log(forged, number):
    """A wrong line is found at its step, and the steps before it match. So is a missing or moved
    line; a line with an impossible step does not block the audit."""
    forge, step, what = LOG[number]
    forge(forged)
    code, text = audit(forged, "--whole")
    assert code == 1 and f"wrong: step {step}: {what}" in text, text
    assert f"same bits: steps 1 to {step - 1} of " in text


@pytest.mark.parametrize(
    ("name", "honest_meta"), [("model.wte.weight", True), ("sums.exponents", False)]
)
def test_a_tensor_of_a_checkpoint_is_changed(forged, name, honest_meta):
    """A changed tensor with new hashes is found by its fingerprint, or by recomputing."""
    loaded = load_newest(forged)
    tensors = {key: tensor.clone() for key, tensor in loaded.tensors.items()}
    tensors[name].view(-1)[0] += 1
    meta = dict(loaded.meta)
    if not honest_meta:
        meta["state_fp"] = f"{state_fp(tensors):016x}"
    shutil.rmtree(forged / "checkpoints" / loaded.name)
    run_id = run_state.read(forged).run_id
    writer = Writer(forged, loaded.generation, keep=9, run_id=run_id)
    assert writer.save(loaded.step, tensors, meta).error is None
    code, text = audit(forged)
    assert code == 1 and f"wrong: step {loaded.step}: state_fp is" in text


def test_a_trainer_that_skips_an_optimizer_step(corpus, tmp_path, monkeypatch):
    """A skipped update is found: that step's loss is right, but the next state or loss is not."""
    step, calls = torch.optim.AdamW.step, []

    def skipping(self, *args, **kwargs):
        calls.append(1)
        return None if len(calls) == 4 else step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", skipping)
        run = trained(corpus, tmp_path / "run")
    code, text = audit(run, "--whole")
    assert code == 1 and ("wrong: step 4: state_fp" in text or "wrong: step 5: loss" in text)


def test_a_checkpoint_with_forged_meta(forged):
    """Wrong metadata with the right tensors is found; without a fingerprint, by recomputing."""
    save_again(forged, state_fp=None)
    assert audit(forged)[0] == 0
    save_again(forged, tokens=1)
    code, text = audit(forged)
    assert code == 1 and "wrong: step 8: tokens is 1 in step-000000000008.2" in text


def test_checkpoints_of_discarded_branches_and_other_runs(honest, corpus, tmp_path):
    """Such checkpoints are listed, not counted, and are not an error."""
    run = trained(corpus, tmp_path / "run", "--steps", "3")
    trained(corpus, run, "--steps", "5")
    (tmp_path / "left").mkdir()
    for path in run.glob("checkpoints/step-*.2"):
        path.rename(tmp_path / "left" / path.name)
    trained(corpus, run, "--lr", "1e-3")
    there = run / "checkpoints"
    shutil.copytree(tmp_path / "left/step-000000000005.2", there / "step-000000000005.2")
    shutil.copytree(honest / "checkpoints/step-000000000008.2", there / "step-000000000008.2")
    code, text = audit(run, "--whole")
    assert code == 0 and " to 8 of 8 (" in text
    assert "not counted: step-000000000008.2: it belongs to another run\n" in text
    left = "step-000000000005.2: the run discarded it: life 3 started from step 3\n"
    assert f"not counted: {left}" in text and text.count("not counted") == 2
    shutil.rmtree(there / "step-000000000003.1")  # the audit does not need the oldest one
    assert audit(run)[0] == 0


def test_only_the_first_wrong_step_is_reported(forged):
    """An unreadable checkpoint is an error at its step, unless an earlier step is wrong."""
    shard = next(forged.glob("checkpoints/step-000000000005.1/shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1])
    code, text = audit(forged, "--whole")
    assert code == 1 and "wrong: step 5: step-000000000005.1 cannot be read: " in text
    assert "same bits: steps 1 to 5 of 8" in text
    edit(forged, 2, loss=up)
    assert "wrong: step 2: loss" in audit(forged, "--whole")[1]


@pytest.fixture
def clock(monkeypatch):
    """Each step takes half a second."""
    ticks = itertools.count()
    fake = SimpleNamespace(monotonic=lambda: 0.5 * next(ticks), time=time.time)
    monkeypatch.setattr(life, "time", fake)


def test_a_run_with_a_time_budget(corpus, tmp_path, clock):
    """The rates follow from the seconds in the log, and from time that was added later. Changed
    seconds are found by the rate."""
    flags, run = ("--steps", "1000", "--eval-every", "1000"), tmp_path / "run"
    for max_time, last in (("3.5", 7), ("6", 12)):
        trained(corpus, run, *flags, "--max-time", max_time)
        code, text = audit(run)
        assert code == 0 and f" to {last} of {last} (" in text
    assert "same bits: steps 1 to 12 of 12 (100%)" in audit(run, "--whole")[1]
    edit(run, 12, train_s=lambda seconds: seconds / 2)
    assert "wrong: step 12: lr is " in audit(run, "--whole")[1]


def test_a_run_with_a_quarantine(tmp_path, monkeypatch):
    """A run has the same bits with its ledger's quarantine, whether the file was repaired since or
    not. With a repaired file and without the decision in the ledger, the rows differ."""
    monkeypatch.setattr(blocks, "RETRY_S", (0.001,))
    source = tmp_path / "source.jsonl"
    texts = (random.Random(n).randbytes(20).hex() for n in range(240))
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    whole = prepare([source], tmp_path / "whole", Settings(tokenizer="bytes"))
    dataset = rewrite(whole, tmp_path / "data", 12)
    mended = Path(shutil.copytree(dataset.dir, tmp_path / "mended"))
    sizes = [group.tokens for group in dataset.row_groups("train")]
    _, second, *_ = lanes.blocks(lanes.deal(sizes, 2, 1337)[1], 1337, 1, 0)
    flip(dataset, second.group)
    run = trained(dataset.dir, tmp_path / "run", "--on-bad", "quarantine", "--steps", "24")
    (decision,) = (event for event in read_ledger(run) if event["event"] == "quarantine")
    assert 0 < decision["step"] < 24
    for data in (dataset.dir, mended):
        code, text = audit(run, "--whole", "--data", str(data))
        assert code == 0 and "same bits: steps 1 to 24 of 24 (100%)" in text
    edit_events(run, "quarantine")
    code, text = audit(run, "--whole", "--data", str(mended))
    assert code == 1 and f"wrong: step {decision['step'] + 1}: batch_fp is " in text


@pytest.mark.parametrize("step", [4, 5])
def test_an_audit_that_is_stopped_says_so(honest, monkeypatch, step):
    """Ctrl-C gives exit code 2, also between two spans, as the remaining steps are unknown."""
    agree, calls = life.agree, itertools.count(1)

    def interrupted(*args):
        if next(calls) == step:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.2)  # time for the thread that ends a process without unsaved state
        return agree(*args)

    monkeypatch.setattr(life, "agree", interrupted)
    code, text = audit(honest, "--whole")
    assert code == 2 and f"stopped by SIGINT after step {step}: start the audit again" in text


def test_runs_that_cannot_be_audited(forged, corpus, tmp_path, monkeypatch):
    """Another processor, inexact sums, and a run without a step give exit code 2 and the reason."""
    fast = trained(corpus, tmp_path / "fast", "--reduce", "fast", "--steps", "2")
    code, text = audit(fast)
    assert code == 2 and "reduce is fast in life 1" in text and "fingerprints" in text
    without(other := Path(shutil.copytree(forged, tmp_path / "empty")), *range(9))
    assert audit(other)[0] == 2
    monkeypatch.setattr(hardware, "machine", lambda _: "another kind")
    monkeypatch.setattr("gptddp.audit.machine", lambda _: "another kind")
    code, text = audit(forged)
    assert code == 2 and "another kind" in text and "on a machine of the first kind" in text


# -- honest runs with an odd history --------------------------------------------------------------


def test_a_run_with_nan_losses(corpus, tmp_path):
    """With a rate that is far too high, losses are null in the log and steps are skipped. That is
    honest, but a number in place of a null is not."""
    run = trained(corpus, tmp_path / "run", "--lr", "1e30")
    line = next(it for _, lines in lines_of(run) for it in lines if it["step"] == 3)
    assert line["loss"] is None and "val_loss" in line and line["val_loss"] is None
    code, said = audit(run, "--whole")
    assert code == 0, said
    edit(run, 3, val_loss=4.5)
    code, said = audit(run, "--whole")
    assert code == 1 and "wrong: step 3: val_loss is 4.5 in the log, but None recomputed" in said


def killed(run):
    """Make the newest life look killed before it could record its end."""
    edit_events(run, "stop", which=slice(-1, None))
    (run / "finished.json").unlink()


def test_discarded_steps_are_listed_and_not_counted(corpus, tmp_path):
    """The second life reaches step 6, and its checkpoints are lost. The third, with another rate,
    is at step 4: steps 5 and 6 do not count."""
    run = trained(corpus, tmp_path / "run", "--steps", "3")
    trained(corpus, run, "--steps", "6")
    for path in run.glob("checkpoints/step-*.2"):
        shutil.rmtree(path)
    killed(run)
    trained(corpus, run, "--steps", "4", "--lr", "1e-3")
    killed(run)
    code, said = audit(run, "--whole")
    assert code == 0 and "same bits: steps 1 to 4 of 4 (100%)" in said
    assert "not counted: the log's steps from 5 on: the run discarded them" in said
