"""One bit of config.json or the ledger is flipped: no hyperparameter is another one."""

from types import SimpleNamespace

import pytest
import torch
from support.field_values import BEGUN

from gptddp.config import Config
from gptddp.errors import ConfigError
from gptddp.flags import of_run
from gptddp.run.directory import resolve, restore_config
from gptddp.run.history import read_ledger
from gptddp.run.in_force import config_in_force
from gptddp.training import opening

WORLD = SimpleNamespace(device=torch.device("cpu"))


@pytest.fixture
def run(life, tmp_path):
    """A run whose second life has changed a field."""
    assert life(**BEGUN) == 0 and life(steps=4, keep=9) == 0
    return tmp_path / "run"


def at_a_start(run) -> dict:
    """The fields of the run, as the next life and its launcher have them."""
    launcher = of_run(config_in_force(Config(run_dir=str(run))))
    ledger = opening._known(run, lambda _: None)[0]
    fields = of_run(resolve(Config(run_dir=str(run)), WORLD, True, ledger.config)[0])
    assert fields == launcher
    return fields


@pytest.mark.parametrize("name", ["config.json", "ledger.jsonl"])
def test_one_bit_changes_no_hyperparameter(run, name, caplog):
    """Whichever of the two is damaged, the other counts: a hash tells, and the life that wrote."""
    path, other = run / name, run / ("config.json" if name[0] == "l" else "ledger.jsonl")
    whole, kept, fields = path.read_bytes(), other.read_bytes(), at_a_start(run)
    begin = whole.rindex(b'"config"')
    differ = 0
    for at in range(begin, whole.index(b"}", begin), 11):
        for bit in (0, 2, 4):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << bit
            path.write_bytes(flipped)
            assert at_a_start(run) == fields, bytes(flipped[max(0, at - 30) : at + 30])
            differ += "counts" in caplog.text or "written anew" in caplog.text
            caplog.clear()
            path.write_bytes(whole)
            other.write_bytes(kept)
    assert differ > 20


def test_a_lost_start_of_the_ledger_undoes_no_change(run, life, caplog):
    """The line that has the newest configuration; the next life records it again."""
    fields, ledger = at_a_start(run), run / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(line for line in lines if '"keep": 9' not in line))
    assert at_a_start(run) == fields
    assert f"{ledger} ends with life 1, and the run has had 2" in caplog.text
    assert life() == 0
    assert [e["config"]["keep"] for e in read_ledger(run) if "config" in e] == [2, 9]


def test_a_flipped_bit_of_the_id_of_a_run_makes_no_other_run(run, caplog):
    """It is written anew, as the ledger has it; one of another run has its own hash."""
    fields, path = at_a_start(run), run / "config.json"
    at = path.read_bytes().index(b'"run_id": "') + 11
    flipped = bytearray(path.read_bytes())
    flipped[at] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(ConfigError, match="are of different runs"):
        restore_config(run, "another id", {**fields, "keep": 1}, 1)
    assert at_a_start(run) == fields
    assert (run / "config.json.bad").read_bytes() == flipped and "is torn" in caplog.text
