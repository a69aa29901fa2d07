"""A flipped bit in the ledger changes no hyperparameter."""

import pytest
from support.field_values import BEGUN

from gptddp.checkpoint import run_state
from gptddp.config import Config
from gptddp.flags import of_run
from gptddp.run.history import read_ledger


@pytest.fixture
def run(life, tmp_path):
    """A run whose second life changed a field."""
    assert life(**BEGUN) == 0 and life(steps=4, keep=9) == 0
    return tmp_path / "run"


def at_a_start(run) -> dict:
    """The fields of the run for the next life and its launcher."""
    return of_run(run_state.in_force(Config(run_dir=str(run))))


def test_one_bit_changes_no_hyperparameter(run):
    """A damaged start does not match its hash; the newest checkpoint counts if it is newer."""
    path, fields = run / "ledger.jsonl", at_a_start(run)
    whole, left_out = path.read_bytes(), 0
    begin = whole.rindex(b'"config"')
    for at in range(begin, whole.index(b"}", begin), 11):
        for bit in (0, 2, 4):
            flipped = bytearray(whole)
            flipped[at] ^= 1 << bit
            path.write_bytes(flipped)
            assert at_a_start(run) == fields, bytes(flipped[max(0, at - 30) : at + 30])
            left_out += len(run_state.read(run).left_out)
    assert left_out > 20


def test_a_lost_start_of_the_ledger_undoes_no_change(run, life, caplog):
    """The newest checkpoint has the configuration, and the next life records it again."""
    fields, ledger = at_a_start(run), run / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    ledger.write_text("".join(line for line in lines if '"keep": 9' not in line))
    assert at_a_start(run) == fields
    assert life(steps=5) == 0
    assert f"{ledger} ends with life 1, but the run is at life 2" in caplog.text
    assert [e["config"]["keep"] for e in read_ledger(run) if "config" in e] == [2, 9]
