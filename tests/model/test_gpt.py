"""The model and its loss against plain PyTorch."""

import dataclasses
import math

import pytest
import torch

from gptddp.config import Config, with_preset
from gptddp.model import optim
from gptddp.model.gpt import build
from gptddp.model.schedule import lr_at

CPU = torch.device("cpu")
TINY = with_preset(Config(n_layer=2, n_embd=32, seq_len=16, precision="fp32"), accelerator=False)


def test_only_the_seed_determines_the_weights():
    """Two builds agree bit for bit, whatever the state of the global generator."""
    first = build(TINY, 100, CPU)
    torch.manual_seed(99)
    second = build(TINY, 100, CPU)
    other = build(dataclasses.replace(TINY, seed=7), 100, CPU)
    for a, b, c in zip(first.parameters(), second.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.dim() < 2 or not torch.equal(a, c)


def test_the_state_is_complete_before_the_first_step():
    """A step changes only the values of the state tensors, not their names or shapes."""
    net = build(TINY, 100, CPU)
    optimizer = optim.build(net, TINY)
    before = {name: t.shape for name, t in optim.state_tensors(net, optimizer).items()}
    x = torch.randint(0, 100, (2, 16))
    net(x, x).backward()
    optimizer.step()
    after = optim.state_tensors(net, optimizer)
    assert before == {name: t.shape for name, t in after.items()}
    assert after["optim.wte.weight.step"].item() == 1


def test_the_learning_rate_warms_up_and_decays():
    """The rate rises linearly, falls by a cosine to final_lr of the peak, and is then constant."""
    c = with_preset(Config(lr=1.0, steps=100, warmup_steps=10, final_lr=0.1), accelerator=False)
    assert lr_at(0, c) == pytest.approx(0.1)
    assert lr_at(9, c) == pytest.approx(1.0)
    assert lr_at(55, c) == pytest.approx(0.55)
    assert lr_at(100, c) == lr_at(500, c) == pytest.approx(0.1)
    rates = [lr_at(s, c) for s in range(10, 100)]
    assert rates == sorted(rates, reverse=True) and all(math.isfinite(r) for r in rates)
