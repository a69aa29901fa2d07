"""The block of results at a run's end: its keys and its figures."""

import logging
import re

import pytest
import torch

from gptddp.config import Config, with_preset
from gptddp.distributed.hardware import peak_flops
from gptddp.model import optim
from gptddp.model.gpt import build
from gptddp.run.history import history, read_ledger
from gptddp.training.results import flops_per_token, lines, mfu

KEYS = [
    *("val_bpb", "training_seconds", "total_seconds", "peak_vram_mb", "mfu_percent"),
    *("total_tokens_M", "num_steps", "num_params_M", "depth"),
]
OF_GPU = ("peak_vram_mb", "mfu_percent")


def block(text: str) -> dict[str, str]:
    """The values that grep "^key:" finds in the last block of a log."""
    found = text.rpartition("\n---\n")[2]
    return dict(re.findall(r"^(\w+): +(\S+)$", found, re.MULTILINE))


def test_a_run_ends_with_a_block_for_grep(run, tmp_path, capfd, caplog):
    """The block has the keys of karpathy/autoresearch in order, once, for the whole run. A stopped
    life prints no block, and a start of the finished run prints it again. The time of the run
    begins with its first process, in any life. A CPU run lacks the two keys of a GPU."""
    caplog.set_level(logging.INFO)
    assert run("--steps", "3") == 0
    assert run("--steps", "6") == 0
    text = "\n".join(it.getMessage() for it in caplog.records)
    found, logged = block(text), list(history(tmp_path / "run"))
    assert list(found) == [key for key in KEYS if key not in OF_GPU] and text.count("\n---\n") == 2
    assert found["val_bpb"] == f"{logged[-1]['val_bpb']:.6f}"
    assert (found["num_steps"], found["depth"]) == ("6", "2")
    assert found["total_tokens_M"] == f"{logged[-1]['tokens'] / 1e6:.1f}"
    assert 0 <= float(found["training_seconds"]) <= float(found["total_seconds"]) < 120
    first, second = (it for it in read_ledger(tmp_path / "run") if it["event"] == "start")
    assert first["run_began"] == second["run_began"] < first["time"]
    caplog.clear()
    assert run("--steps", "6") == 0
    assert block("\n".join(it.getMessage() for it in caplog.records)) == found


def test_a_gpu_has_its_memory_and_its_mfu_in_the_block():
    """Both keys are at their places; the MFU of a GPU with an unknown peak is `n/a`."""
    found = dict.fromkeys(KEYS, 1) | {"mfu_percent": None}
    text = "\n".join(["", *lines(found)])
    assert list(block(text)) == KEYS and "\nmfu_percent:      n/a\n" in text


def test_a_stopped_life_has_no_block(run, caplog, monkeypatch):
    """A stopped life prints no block, because its run continues."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr("gptddp.training.stop.StopFlag.asked", property(lambda self: True))
    assert run("--steps", "3") == 143
    assert "---" not in [it.getMessage() for it in caplog.records]


def test_mfu_counts_all_ranks_and_only_the_products():
    """Four times the ranks, for the same tokens and time, quarter it; `gpt2` has 0.857 GFLOP a
    token (6 for each of 124 M parameters less the positions, and attention)."""
    c = with_preset(Config(preset="gpt2"), accelerator=True)
    with torch.device("meta"):
        net = build(c, 50257, torch.device("meta"))
    flops = flops_per_token(c, optim.state_tensors(net, optim.build(net, c)))
    assert flops == pytest.approx(0.857e9, rel=0.01)
    one = mfu(flops, 10**6, 2.0, 1, 1e15)
    assert one == pytest.approx(flops * 1e6 / 2e15)
    assert mfu(flops, 10**6, 2.0, 4, 1e15) == pytest.approx(one / 4)
    assert mfu(flops, 0, 0.0, 1, 1e15) is None and mfu(flops, 5, 1.0, 1, None) is None


def test_the_peak_of_a_gpu_is_given_only_if_it_is_known():
    """The peak follows from the name, for bf16 only; tf32 and other GPUs have no peak."""
    bf16, fp32 = Config(precision="bf16"), Config(precision="fp32")
    assert peak_flops("NVIDIA H100 80GB HBM3", bf16) == 989.5e12
    assert peak_flops("NVIDIA H100 PCIe", bf16) == 756e12
    assert peak_flops("NVIDIA H100 80GB HBM3", fp32) is None
    assert peak_flops("NVIDIA GeForce RTX 4090", bf16) is None
