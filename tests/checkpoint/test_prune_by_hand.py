"""`gptddp checkpoints --prune`: what stays where a user deletes."""

import os

import torch
from click.testing import CliRunner
from support import ledgers
from support.many_checkpoints import save, steps

from gptddp.checkpoint import store
from gptddp.checkpoint.writer import Writer
from gptddp.cli import cli
from gptddp.run.history import Ledger


def by_hand(run_dir, *args):
    if not (run_dir / "ledger.jsonl").exists():
        ledgers.begun(run_dir, {"keep": 3}, run_id=None)
    return CliRunner().invoke(cli, ["checkpoints", str(run_dir), *args])


def test_prune_by_hand_counts_only_verified_ones(tmp_path):
    """A flipped bit that only reading finds does not push out the last good ones."""
    root = save(tmp_path, *range(1, 6))
    shard = root / "step-000000000005.1" / "shard-0-of-1.bin"
    shard.write_bytes(b"\1" + shard.read_bytes()[1:])
    result = by_hand(tmp_path, "--prune", "--keep", "1")
    assert result.exit_code == 0, result.output
    assert steps(tmp_path) == [(1, 5), (1, 4)]
    assert result.stderr.splitlines() == [f"deleted step-00000000000{n}.1" for n in (3, 2, 1)]
    assert result.stdout.count("complete") == 2


def test_prune_by_hand_keeps_what_the_run_keeps(tmp_path):
    """Without --keep it is the run's own number; --keep without --prune is a mistake."""
    save(tmp_path, *range(1, 6))
    assert by_hand(tmp_path, "--keep", "1").exit_code == 2
    assert by_hand(tmp_path, "--prune").exit_code == 0
    assert steps(tmp_path) == [(1, 5), (1, 4), (1, 3)]


def test_prune_by_hand_spares_the_parent_of_a_save_in_flight(tmp_path):
    """A life that began with an older checkpoint, and has not saved yet, keeps its parent."""
    root = save(tmp_path, *range(1, 6))
    Ledger(tmp_path).event("start", 2, source="step-000000000002.1", config={"keep": 3})

    def prune_meanwhile():
        by_hand(tmp_path, "--prune", "--keep", "1")

    parent = "step-000000000002.1"
    writer = Writer(tmp_path, 2, parent=parent, keep=99, before_commit=prune_meanwhile)
    assert writer.save(3, {"x": torch.ones(9)}, {}).error is None
    assert steps(tmp_path) == [(2, 3), (1, 5), (1, 2)]
    assert store.read_manifest(root / "step-000000000003.2")["parent"] == "step-000000000002.1"


def test_none_valid_deletes_nothing(tmp_path):
    """Where no checkpoint can be used, none is deleted, and the exit code says so."""
    root = save(tmp_path, 1, 2, 3)
    for name in os.listdir(root):
        if name.startswith("step"):
            os.truncate(root / name / "shard-0-of-1.bin", 1)
    assert by_hand(tmp_path, "--prune", "--keep", "1").exit_code == 4
    assert len(steps(tmp_path)) == 3
