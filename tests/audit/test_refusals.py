"""`gptddp audit` refuses other data, other libraries and other machines, and missing records."""

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.audits import audit, edit_events, save_again, trained
from support.rewritten_dataset import rewrite

from gptddp import cli as commands
from gptddp.checkpoint.load import load_newest
from gptddp.data import blocks
from gptddp.data.dataset import open_dataset
from gptddp.errors import Unusable
from gptddp.run.directory import LEDGER

pytestmark = pytest.mark.usefixtures("train_here")


def test_data_that_have_been_moved(corpus, tmp_path):
    """Data that were moved are read where the newest life read them, for the steps of all lives."""
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
    """Other data are refused even from the seed, as another batch would look like a forged one."""
    other = rewrite(open_dataset(corpus), tmp_path / "other", 7)
    for flags in ((), ("--whole",)):
        code, text = audit(honest, "--data", str(other.dir), *flags)
        assert code == 2 and "is not the data that run" in text


def test_another_library_is_refused(forged):
    """An audit even from the seed is refused: the library may encode the text differently."""
    data = load_newest(forged).meta["data"]
    save_again(forged, data=data | {"library": "tiktoken 0.0.1"})
    for flags in ((), ("--whole",)):
        code, text = audit(forged, *flags)
        assert code == 2 and "its text with tiktoken 0.0.1" in text and "tiktoken==0.0.1" in text


def test_no_cache_of_rows_is_used(corpus, tmp_path):
    """The cache may have rows that the data no longer have: it is neither read nor written."""
    run = trained(corpus, tmp_path / "run", "--cache-dir", str(tmp_path / "cache"))
    cached = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    for path in cached:
        path.write_text("damaged")
    assert audit(run, "--whole")[0] == 0 and cached
    assert {path.read_text() for path in cached} == {"damaged"}


def test_data_that_are_damaged_here_are_no_error_of_the_run(corpus, tmp_path, monkeypatch):
    """Even a run with quarantine is not called wrong for row groups that it could read."""
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
    assert code == 2 and "cannot be read here, but the run has read it for step " in text


# -- no verdict is possible ------------------------------------------------------------------------


def test_a_ledger_that_lacks_a_life(forged):
    """Without a start of a life in the ledger, its machine and configuration are unknown."""
    edit_events(forged, "start", which=slice(1, None))
    code, text = audit(forged)
    assert code == 2 and "ledger.jsonl has no configuration for life 2" in text


def test_a_rank_on_another_machine_that_joined_later(forged):
    """The machine of a joiner is checked too, although the start of the life does not name it."""
    it = {"event": "world", "time": 1.0, "generation": 1, "step": 3, "machines": ["another kind"]}
    with open(forged / LEDGER, "a") as ledger:
        ledger.write(json.dumps(it) + "\n")
    code, text = audit(forged)
    assert code == 2 and "life 1 of" in text and "was computed on another kind" in text


def test_a_quarantine_of_missing_row_groups(forged):
    """A quarantine of row groups that the data lack is refused, as at a start."""
    it = {"event": "quarantine", "time": 1.0, "generation": 1, "step": 3, "row_groups": [9999]}
    with open(forged / LEDGER, "a") as ledger:
        ledger.write(json.dumps(it) + "\n")
    code, text = audit(forged)
    assert code == 2 and "row_groups has 9999" in text


def test_a_checkpoint_on_a_failing_volume(honest, monkeypatch):
    """An error of the volume is not an error of the run."""

    def failing(path, *_):
        raise Unusable(path, "Input/output error", damaged=False, transient=True)

    monkeypatch.setattr("gptddp.audit.load", failing)
    code, text = audit(honest)
    assert code == 2 and "cannot be read: Input/output error" in text


def test_an_audit_is_one_process(honest, monkeypatch):
    """Under torchrun an audit is refused: it would wait for ranks that never come."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    code, text = audit(honest)
    assert code == 2 and "an audit is one process" in text


def test_ctrl_c_is_no_difference(honest, monkeypatch):
    """Ctrl-C while files are read gives exit code 130, as 1 would mean that the run is wrong."""

    def interrupted(run):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "_run_dir", interrupted)
    assert CliRunner().invoke(commands.cli, ["audit", str(honest)]).exit_code == 130
