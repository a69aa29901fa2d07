"""Checks that two runs are the same to the last bit, as every fault test does at its end."""

from collections.abc import Sequence
from pathlib import Path

from gptddp.checkpoint.load import load_newest
from gptddp.run.history import history
from gptddp.run.lines import Line

# The fields of a line, except times, speeds and the number of ranks.
FIELDS = ("step", "loss", "grad_norm", "lr", "tokens", "batch_fp", "chain_fp")
SOME = ("val_loss", "val_bpb", "state_fp")  # fields of some steps


def check_same_lines(lines: Sequence[Line], wanted: Sequence[Line]) -> None:
    """Assert that every step is there once, with the same rows and numbers."""
    assert [line["step"] for line in lines] == list(range(1, len(wanted) + 1))
    for line, other in zip(lines, wanted, strict=True):
        keys = [*FIELDS, *(key for key in SOME if key in line and key in other)]
        assert {key: line[key] for key in keys} == {key: other[key] for key in keys}


def check_same_bits(run: Path, undisturbed: Path) -> None:
    """Assert that the lines of the log are the same, and the last state has the same bytes."""
    wanted = list(history(undisturbed))
    check_same_lines(list(history(run)), wanted)
    newest, last = (load_newest(it, set_aside=False) for it in (run, undisturbed))
    assert newest and last and newest.step == len(wanted)
    assert newest.tensors.keys() == last.tensors.keys()
    for name, tensor in newest.tensors.items():
        assert bytes(tensor.numpy()) == bytes(last.tensors[name].numpy()), name
