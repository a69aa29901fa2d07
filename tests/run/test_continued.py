"""In a continued run every field of the configuration is kept, changed and recorded, or refused."""

import dataclasses
import errno
import json
import logging
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import ledgers
from support.field_values import BEGUN, FIRST, VALUES
from support.forked import TRAIN, ranks
from support.paths import ROOT
from support.toy import SMALL

from gptddp import train
from gptddp.checkpoint import run_state
from gptddp.config import FIELDS, FIXED, KEPT, START, Config, with_preset
from gptddp.data import blocks
from gptddp.errors import ConfigError
from gptddp.flags import flag, from_args, from_saved, to_args
from gptddp.run import copies
from gptddp.run.history import history, read_ledger
from gptddp.training import life as training_life
from gptddp.training.changes import resolve

OTHER = {name: it for name, (_, it) in VALUES.items() if FIELDS[name].metadata["fate"] == KEPT}
CPU: Any = SimpleNamespace(device=torch.device("cpu"))
JSON_BEGUN = json.loads(json.dumps(BEGUN))


def test_every_field_has_a_decision():
    """This fails for a new field without a rule for continued runs."""
    kinds = {name: f.metadata.get("fate") for name, f in FIELDS.items()}
    assert set(kinds.values()) == {FIXED, KEPT, START}
    assert set(VALUES) == {name for name, kind in kinds.items() if kind != START}
    for accelerator in (False, True):
        default = with_preset(Config(), accelerator=accelerator)
        by_hardware = {"precision", "matmul", "attention", "threads", "reduce"}
        for name in set(VALUES) - by_hardware:
            assert getattr(default, name) != FIRST[name], f"{name}: give another first value"
        for name in VALUES:
            assert FIELDS[name].default is None, f"{name}: a default would count as given"


def test_the_guide_lists_the_fixed_fields_and_those_of_a_start():
    """docs/train.md has the same two lists of fields."""
    text = " ".join((ROOT / "docs/train.md").read_text().split())
    fixed = text.split("on which rows, are fixed: ")[1].split(".")[0]
    here = text.split(" hold for one start")[0].rpartition(" - ")[2]
    kinds = {name: f.metadata["fate"] for name, f in FIELDS.items()}
    for kind, words in ((FIXED, fixed), (START, here)):
        assert re.findall(r"`(\w+)`", words) == [name for name in FIELDS if kinds[name] == kind]


def continued(*args: str, run: dict[str, Any] = FIRST) -> Config:
    """The configuration of another life of a run; by default all fields have their first values."""
    return resolve(from_args(["--run-dir", "run", *args]), CPU, from_saved("ledger", run))


@pytest.mark.parametrize("name", VALUES)
def test_a_field_is_kept_changed_or_refused(name):
    """A field that is not given is kept; another value is accepted, or refused with both."""
    assert getattr(continued(), name) == FIRST[name]
    assert getattr(continued(*to_args({name: FIRST[name]})), name) == FIRST[name]
    other = to_args({name: VALUES[name][1]})
    if FIELDS[name].metadata["fate"] == KEPT:
        assert getattr(continued(*other), name) == VALUES[name][1]
        return
    with pytest.raises(ConfigError) as error:
        continued(*other)
    assert f"{name}: {FIRST[name]} -> {VALUES[name][1]}" in str(error.value)
    assert f"leave out {flag(name)} to continue it" in str(error.value)


def test_a_given_default_replaces_the_value_of_the_run(tmp_path):
    """This holds for the command line and for a TOML file."""
    toml = tmp_path / "job.toml"
    toml.write_text("[train]\ngrad_clip = 1\n")
    config = continued("--weight-decay", "0.1", "--config", str(toml))
    assert (config.weight_decay, config.grad_clip, config.final_lr) == (0.1, 1.0, 0.5)


def test_a_field_that_the_run_has_not_recorded_has_its_default():
    """A run from before the field existed behaved like the default."""
    config = continued(run={"preset": "tiny"})
    assert (config.seed, config.keep, config.n_layer) == (1337, 3, 4)


def test_fields_of_a_newer_version_are_refused():
    """A run with unknown fields is not continued without them."""
    with pytest.raises(ConfigError, match=r"fields of a newer gptddp \(newer\): use the version"):
        continued(run=FIRST | {"newer": [1]})


def test_the_launcher_uses_the_configuration_of_the_run(tmp_path):
    """The launcher takes missing values from the run, and leaves refusals to the trainer."""
    config = Config(run_dir=str(tmp_path), lr=1.0)
    assert run_state.in_force(config) == config
    ledgers.begun(tmp_path, FIRST)
    assert run_state.in_force(config) == dataclasses.replace(config, **FIRST | {"lr": 1.0})
    ledgers.begun(tmp_path, {"preset": "tiny", "lanes": 12})
    other = Config(run_dir=str(tmp_path), batch=6)  # the lanes do not divide it
    assert run_state.in_force(other) == other
    with pytest.raises(ConfigError, match="another configuration .batch: 48 -> 6.: leave"):
        continued("--batch", "6", run={"preset": "tiny", "lanes": 12})


# -- with the trainer ----------------------------------------------------------------------------


def saved(run: Path) -> dict[str, Any]:
    values = json.loads((run / "config.json").read_text())["config"]
    return {name: values[name] for name in VALUES}


def changes(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_ledger(run) if event["event"] == "changed"]


def test_a_continued_run_keeps_every_field_and_records_every_change(life, tmp_path, caplog):
    """A run begins with all fields, and continues with none, with others, and with these again."""
    caplog.set_level(logging.INFO)
    run = tmp_path / "run"
    assert life(**BEGUN) == 0
    assert saved(run) == JSON_BEGUN and not changes(run)
    assert life() == 0 and life(**BEGUN) == 0
    assert saved(run) == JSON_BEGUN and not changes(run)

    caplog.clear()
    assert life(**OTHER) == 0
    wanted = JSON_BEGUN | json.loads(json.dumps(OTHER))
    assert saved(run) == wanted
    told = {event["field"]: event for event in changes(run)}
    assert set(told) == set(OTHER) and len(told) == len(changes(run))
    for name, event in told.items():
        assert (event["old"], event["new"]) == (JSON_BEGUN[name], wanted[name])
        assert (event["step"], event["generation"]) == (3, 2)
        assert f"changed after step 3: {name}: {JSON_BEGUN[name]} -> {wanted[name]}" in caplog.text

    assert life(**OTHER) == 0 and life() == 0
    assert saved(run) == wanted and len(changes(run)) == len(OTHER)
    assert [line["step"] for line in history(run)] == [1, 2, 3, 4, 5]


def test_config_json_has_only_settings_that_a_step_has_used(life, tmp_path, monkeypatch):
    """A life that ends before its first step changes the run for ledger and launcher, but not the
    copy for people."""
    run, asked = tmp_path / "run", Config(run_dir=str(tmp_path / "run"))
    assert life(**BEGUN) == 0 and run_state.why_finished(asked)

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training_life, "agree", killed)
        life(lr=0.5, steps=4)
    assert saved(run) == JSON_BEGUN
    assert [(event["field"], event["generation"]) for event in changes(run)] == [
        ("steps", 2),
        ("lr", 2),
    ]
    in_force = run_state.in_force(asked)
    assert (in_force.steps, in_force.lr) == (4, 0.5) and not run_state.why_finished(asked)
    assert life() == 0
    assert saved(run) == JSON_BEGUN | {"lr": 0.5, "steps": 4} and len(changes(run)) == 2


def contents(run: Path) -> dict[str, bytes]:
    return {str(it): it.read_bytes() for it in sorted(run.rglob("*")) if it.is_file()}


def test_a_finished_run_with_another_setting_is_refused(life, tmp_path, capsys):
    """No step would use it, so nothing is written. With more steps it is accepted."""
    run = tmp_path / "run"
    assert life(**BEGUN) == 0
    before = contents(run)
    wanted = "no step remains for lr: 0.002 -> 0.01: all 3 steps are done; to continue, give a larg"
    for more, said in (({}, wanted), ({"steps": 2}, "but 3 steps are already done; to continue")):
        assert life(lr=0.01, **more) == 2
        assert said in (error := capsys.readouterr().err) and "another --run-dir" in error
        with pytest.raises(ConfigError, match="no step remains for"):
            run_state.why_finished(Config(run_dir=str(run), lr=0.01, **more))
    assert contents(run) == before
    assert life(lr=0.01, steps=4) == 0 and saved(run)["lr"] == 0.01


OTHER_FLAGS = "import os, sys; sys.argv += ['{}', '{}'] * (os.environ['RANK'] == '1'); "


@pytest.mark.parametrize(("name", "other", "code"), [("lr", "0.5", 0), ("seed", "8", 2)])
def test_flags_given_to_one_rank_only_are_reported_or_refused(corpus, tmp_path, name, other, code):
    """With torchrun or Slurm each node has its own command, but only rank 0's flags count."""
    where = ["--data", str(corpus), "--run-dir", str(tmp_path / "run"), "--steps", "1"]
    flags = [*SMALL, *where, flag(name), "0.25" if name == "lr" else "7"]
    found = ranks(2, *flags, code=OTHER_FLAGS.format(flag(name), other) + TRAIN)
    codes = [process.wait(60) for process in found]
    said = found[0].stderr.read()
    was = "0.25 -> 0.5" if name == "lr" else "7 -> 8"
    assert codes == [code, code], said
    assert f"rank 1 was given another configuration than rank 0 ({name}: {was}): " in said
    assert "give all ranks the same flags" in said
    assert not (tmp_path / "run/lease.json").exists()


OTHERS = {
    "library": "import os, tiktoken; tiktoken.__version__ += '.9' * int(os.environ['RANK'])",
    "dataset": "import os; from gptddp.data.dataset import Dataset as it\n"
    "it.sha256 = os.environ['RANK'] * 64",
    "code": "import os; os.environ['GPTDDP_CODE'] = os.environ['RANK'] * 64",
}


@pytest.mark.parametrize("what", OTHERS)
def test_a_rank_with_different_steps_is_refused_from_the_first_life_on(corpus, tmp_path, what):
    """With another tokenizer library, other data, or other code the run does not begin."""
    where = ["--data", str(corpus), "--run-dir", str(tmp_path / "run"), "--steps", "1"]
    found = ranks(2, *SMALL, *where, code=f"{OTHERS[what]}\n{TRAIN}")
    assert [process.wait(60) for process in found] == [2, 2]
    said = found[0].stderr.read()
    assert f"rank 1 has another {what} than rank 0" in said and "give all ranks the same" in said
    assert not list((tmp_path / "run").glob("*.json"))


def test_a_copy_that_cannot_be_written_does_not_end_the_run(life, monkeypatch, caplog):
    """The run continues and ends without the copies, with a warning for each."""

    def full(path, content):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(copies, "write_json_atomic", full)
    assert life(**BEGUN) == 0
    assert caplog.text.count("config.json is out of date") == 1
    assert caplog.text.count("finished.json': free space") == 1


def test_missing_files_follow_the_on_bad_of_the_run(
    corpus, tmp_path, train_here, monkeypatch, capfd
):
    """If --on-bad is not given, the run's own value decides: it skips the files, or names them."""
    monkeypatch.setattr(blocks, "RETRY_S", (0.001,))  # for each row group
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    for name in ("quarantine", "fail"):
        where = ["--data", str(data), "--run-dir", str(tmp_path / name)]
        assert train.main([*SMALL, *where, "--steps", "1", "--on-bad", name]) == 0
    (shard,) = (data / "train").iterdir()
    shard.write_bytes(shard.read_bytes()[:-1])
    where = ["--data", str(data), "--cache-dir", "none", "--steps", "2", "--run-dir"]
    assert train.main([*where, str(tmp_path / "quarantine")]) == 2  # it was the only file
    assert "row groups of the train split are in quarantine" in capfd.readouterr().err
    for name in ("fail", "new"):
        assert train.main([*where, str(tmp_path / name)]) == 2
        assert "train/00000.parquet" in capfd.readouterr().err
    assert not list((tmp_path / "new").iterdir())
    assert len(read_ledger(tmp_path / "fail")) == 3
