"""A run that is continued: every field of the configuration stays, is recorded, or is refused."""

import dataclasses
import errno
import json
import logging
import math
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.field_values import BEGUN, FIRST, VALUES
from support.forked import TRAIN, ranks
from support.paths import ROOT
from support.toy import SMALL

from gptddp import train
from gptddp.config import FIELDS, FIXED, KEPT, NOT_OF_THE_RUN, START, Config, with_preset
from gptddp.errors import ConfigError
from gptddp.files import write_json_atomic
from gptddp.flags import flag, from_args, to_args
from gptddp.model.schedule import lr_at
from gptddp.run.directory import resolve
from gptddp.run.history import history, read_ledger
from gptddp.run.in_force import config_in_force, is_finished
from gptddp.training import changes as training_changes
from gptddp.training import end

OTHER = {name: other for name, (_, other) in VALUES.items() if FIELDS[name].metadata["of"] == KEPT}
CPU: Any = SimpleNamespace(device=torch.device("cpu"))
JSON_BEGUN = json.loads(json.dumps(BEGUN))


def test_every_field_has_a_decision():
    """A new field says what becomes of it in a run that is continued, or this fails."""
    kinds = {name: f.metadata.get("of") for name, f in FIELDS.items()}
    assert set(kinds.values()) == {FIXED, KEPT, START}
    assert {name for name, of in kinds.items() if of == START} == set(NOT_OF_THE_RUN)
    assert set(VALUES) == set(FIELDS) - set(NOT_OF_THE_RUN)
    for accelerator in (False, True):
        default = with_preset(Config(), accelerator=accelerator)
        by_hardware = {"precision", "matmul", "attention", "threads", "reduce"}
        for name in set(VALUES) - by_hardware:
            assert getattr(default, name) != FIRST[name], f"{name}: give another first value"
        for name in VALUES:
            assert FIELDS[name].default is None, f"{name}: a default would count as given"


def test_the_guide_says_what_is_fixed_and_what_is_not_of_the_run():
    """docs/train.md has the same two lists of fields."""
    text = " ".join((ROOT / "docs/train.md").read_text().split())
    fixed = text.split("on which rows, are fixed: ")[1].split(".")[0]
    here = text.split(" belong to a start and its machine")[0].rpartition(" - ")[2]
    kinds = {name: f.metadata["of"] for name, f in FIELDS.items()}
    for of, words in ((FIXED, fixed), (START, here)):
        assert re.findall(r"`(\w+)`", words) == [name for name in FIELDS if kinds[name] == of]


@pytest.fixture
def continued(tmp_path):
    """continued(*flags): the configuration of another life of a run with all first values."""
    saved = {"data": "", "run_dir": "", "cache_dir": "auto", "device": None, "metrics_port": 0}
    write_json_atomic(tmp_path / "config.json", {"config": saved | FIRST})
    return lambda *args: resolve(from_args(["--run-dir", str(tmp_path), *args]), CPU, begun=True)


@pytest.mark.parametrize("name", VALUES)
def test_what_is_not_given_stays_and_what_is_given_counts_or_is_refused(continued, name):
    """Each field alone: kept as the run has it; another value is taken, or refused with both."""
    config, before = continued()
    assert getattr(config, name) == getattr(before, name) == FIRST[name]
    assert getattr(continued(*to_args({name: FIRST[name]}))[0], name) == FIRST[name]
    other = to_args({name: VALUES[name][1]})
    if FIELDS[name].metadata["of"] == KEPT:
        assert getattr(continued(*other)[0], name) == VALUES[name][1]
        return
    with pytest.raises(ConfigError) as error:
        continued(*other)
    assert f"{name}: {FIRST[name]} -> {VALUES[name][1]}" in str(error.value)
    assert f"leave out {flag(name)} to continue it" in str(error.value)


def test_a_default_that_is_given_is_given(continued, tmp_path):
    """On the command line and in a TOML file: the run's own value does not count then."""
    toml = tmp_path / "job.toml"
    toml.write_text("[train]\ngrad_clip = 1\n")
    config, _ = continued("--weight-decay", "0.1", "--config", str(toml))
    assert (config.weight_decay, config.grad_clip, config.final_lr) == (0.1, 1.0, 0.5)


def test_a_field_that_the_run_has_not_saved_has_its_default(tmp_path):
    """A run that was begun before there was the field has done what the default does."""
    write_json_atomic(tmp_path / "config.json", {"config": {"preset": "tiny"}})
    config, before = resolve(Config(run_dir=str(tmp_path)), CPU, begun=True)
    assert config == dataclasses.replace(before, run_dir=str(tmp_path))
    assert (config.seed, config.keep, config.n_layer) == (1337, 3, 4)


def test_who_does_not_decide_knows_the_run_as_well(tmp_path):
    """The launcher and the rescue of a snapshot take what is not given from the run."""
    config = Config(run_dir=str(tmp_path), lr=1.0)
    assert config_in_force(config) == config
    write_json_atomic(tmp_path / "config.json", {"config": FIRST})
    assert config_in_force(config) == dataclasses.replace(config, **FIRST | {"lr": 1.0})
    (tmp_path / "config.json").write_text("{")
    assert config_in_force(config) == config


def test_who_does_not_decide_leaves_it_to_the_trainer_to_refuse_what_the_run_has_fixed(tmp_path):
    """A batch that the lanes of the run do not divide: the run has fixed its batch as well."""
    write_json_atomic(tmp_path / "config.json", {"config": {"preset": "tiny", "lanes": 12}})
    config = Config(run_dir=str(tmp_path), batch=6)
    assert config_in_force(config) == config
    with pytest.raises(
        ConfigError, match="begun with another configuration .batch: 48 -> 6.: leave"
    ):
        resolve(config, CPU, begun=True)


# -- with the trainer ----------------------------------------------------------------------------


def saved(run: Path) -> dict[str, Any]:
    values = json.loads((run / "config.json").read_text())["config"]
    return {name: values[name] for name in VALUES}


def changes(run: Path) -> list[dict[str, Any]]:
    return [event for event in read_ledger(run) if event["event"] == "changed"]


def test_a_continued_run_keeps_every_field_and_records_every_change(life, tmp_path, caplog):
    """Begun with all fields given, continued with none, with others, and with the same again."""
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
        assert (event["step"], event["generation"]) == (3, 4)
        assert f"changed after step 3: {name}: {JSON_BEGUN[name]} -> {wanted[name]}" in caplog.text
    before = Config(**BEGUN)
    jump = f"{lr_at(3, dataclasses.replace(before, **OTHER)):.1e} instead of {lr_at(3, before):.1e}"
    assert f"the learning rate of step 4 is {jump}" in caplog.text

    assert life(**OTHER) == 0 and life() == 0
    assert saved(run) == wanted and len(changes(run)) == len(OTHER)
    assert [line["step"] for line in history(run)] == [1, 2, 3, 4, 5]


def test_a_life_that_is_killed_before_it_has_changed_leaves_the_change_to_the_next(
    life, tmp_path, monkeypatch
):
    """The ledger says it first: no change counts that is not there, and none is lost."""
    run = tmp_path / "run"
    assert life(**BEGUN) == 0

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training_changes, "write_config", killed)
        life(keep=9, steps=4)
    assert saved(run) == JSON_BEGUN
    assert life(keep=9, steps=4) == 0 and life() == 0
    assert saved(run) == JSON_BEGUN | {"keep": 9, "steps": 4}
    told = [(event["field"], event["generation"]) for event in changes(run)]
    assert told == [("steps", 2), ("keep", 2)]


def test_the_launcher_knows_of_a_change_that_the_ledger_alone_has(life, tmp_path, monkeypatch):
    """A finished run that is extended, and killed before config.json has it, is not finished."""
    asked = Config(run_dir=str(tmp_path / "run"))
    assert life(**BEGUN) == 0
    assert is_finished(asked)

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training_changes, "write_config", killed)
        life(keep=9, steps=4)
    assert saved(tmp_path / "run") == JSON_BEGUN
    assert (config_in_force(asked).steps, config_in_force(asked).keep) == (4, 9)
    assert not is_finished(asked) and is_finished(dataclasses.replace(asked, steps=3))
    (tmp_path / "run/config.json").write_text("{")
    assert config_in_force(asked).steps == 4


OTHER_FLAGS = "import os, sys; sys.argv += ['{}', '{}'] * (os.environ['RANK'] == '1'); "


@pytest.mark.parametrize(("name", "other", "code"), [("lr", "0.5", 0), ("seed", "8", 2)])
def test_flags_that_one_rank_alone_is_given_are_told_or_refused(
    corpus, tmp_path, name, other, code
):
    """By torchrun or Slurm each node has a command of its own; only that of rank 0 counts."""
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


OTHER_LIBRARY = "import os, tiktoken; tiktoken.__version__ += '.9' * int(os.environ['RANK']); "
OTHER_DATA = """
import os
from gptddp.data.dataset import Dataset
Dataset.sha256 = os.environ['RANK'] * 64
"""


@pytest.mark.parametrize("what", ["library", "dataset"])
def test_a_rank_whose_rows_would_be_others_is_refused_from_the_first_life_on(
    corpus, tmp_path, what
):
    """Another version of what encodes, or a copy of other data: the run does not begin."""
    where = ["--data", str(corpus), "--run-dir", str(tmp_path / "run"), "--steps", "1"]
    code = (OTHER_LIBRARY if what == "library" else OTHER_DATA) + TRAIN
    found = ranks(2, *SMALL, *where, code=code)
    assert [process.wait(60) for process in found] == [2, 2]
    said = found[0].stderr.read()
    assert f"rank 1 has another {what} than rank 0" in said and "give all ranks the same" in said
    assert not list((tmp_path / "run").glob("*.json"))


def test_a_change_on_a_full_disk_is_recorded_before_a_checkpoint(life, tmp_path, monkeypatch):
    """The run goes on with it, and no checkpoint of it exists before config.json has it."""
    run, tries = tmp_path / "run", []
    assert life(**BEGUN) == 0
    write = training_changes.write_config

    def full(*args):
        assert not (run / "checkpoints/step-000000000005.2").exists()
        tries.append(changes(run))
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device", str(run))
        write(*args)

    monkeypatch.setattr(training_changes, "write_config", full)
    monkeypatch.setattr(end, "RETRY_S", 0.01)
    assert life(steps=5) == 0
    assert saved(run) == JSON_BEGUN | {"steps": 5} and len(changes(run)) == 1
    assert len(tries) == 3 and all(tries)  # the ledger had it each time
    assert (run / "checkpoints/step-000000000005.2").exists()


def test_a_field_of_a_newer_version_is_kept_for_it(life, tmp_path, caplog):
    """This version trains without it, says so, and does not take it out of config.json."""
    assert life(**BEGUN) == 0
    path = tmp_path / "run/config.json"
    content = json.loads(path.read_text())
    write_json_atomic(path, content | {"config": content["config"] | {"newer": [1]}})
    assert life(steps=4) == 0
    assert "does not know, and trains without: newer" in caplog.text
    assert json.loads(path.read_text())["config"]["newer"] == [1]


def test_files_that_are_missing_are_judged_by_the_on_bad_of_the_run(
    corpus, tmp_path, train_here, capfd
):
    """Also where it is not given: quarantine goes on without them, fail names them."""
    data = tmp_path / "data"
    shutil.copytree(corpus, data)
    for name in ("quarantine", "fail"):
        where = ["--data", str(data), "--run-dir", str(tmp_path / name)]
        assert train.main([*SMALL, *where, "--steps", "1", "--on-bad", name]) == 0
    (shard,) = (data / "train").iterdir()
    shard.write_bytes(shard.read_bytes()[:-1])
    where = ["--data", str(data), "--cache-dir", "none", "--run-dir"]
    assert train.main([*where, str(tmp_path / "quarantine")]) == 0
    capfd.readouterr()
    for name in ("fail", "new"):
        assert train.main([*where, str(tmp_path / name)]) == 2
        assert "train/00000.parquet" in capfd.readouterr().err
    assert not list((tmp_path / "new").iterdir())
    assert len(read_ledger(tmp_path / "fail")) == 3


def test_a_run_that_is_not_extended_has_no_jump(life, caplog):
    """The learning rate is spoken of where it changes, and not where only its end does."""
    assert life(**BEGUN) == 0
    assert life(keep=4) == 0
    assert "learning rate" not in caplog.text and math.isclose(lr_at(3, Config(**BEGUN)), 1e-3)
