"""Muon: its updates, its parameters, and the division of the work in a world of any size."""

import dataclasses
import math
import random

import pytest
import torch

from gptddp.config import Config, with_preset
from gptddp.model import optim
from gptddp.model.gpt import build
from gptddp.model.muon import cost, orthogonal, shared_out
from gptddp.run.progress import Progress

CPU = torch.device("cpu")
SMALL = Config(n_layer=2, n_embd=32, n_head=2, seq_len=16, precision="fp32", optimizer="muon")
MUON = with_preset(SMALL, accelerator=False)
RECIPE = with_preset(dataclasses.replace(SMALL, optimizer="autoresearch"), accelerator=False)


@pytest.mark.parametrize("shape", [(64, 64), (96, 32), (32, 96), (1, 7), (7, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_approximates_the_polar_factor(shape, dtype):
    """Against float64 SVD: the same singular vectors, and singular values of 0.86 to 1.14 if those
    of the matrix are at least 1/1000 of its norm, here over three decades."""
    torch.manual_seed(sum(shape))
    u, _, v = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    values = torch.logspace(0, -2.5, min(shape), dtype=torch.float64)
    for scale in (1e-8, 1.0, 1e8):
        found = orthogonal((scale * (u * values) @ v).float(), dtype).double()
        within = u.T @ found @ v.T  # diagonal, if the singular vectors are the same
        noise = 1e-3 if dtype == torch.float32 else 0.05
        assert (within - within.diag().diag()).abs().max() < noise
        assert within.diag().min() > 0.85 - noise and within.diag().max() < 1.142 + noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tiny_gradient_has_a_tiny_update(dtype):
    """At any magnitude of fp32, also if squares are 0, an update is not NaN and not larger than for
    a common gradient; below 1e-21 it is less than a tenth of that."""
    torch.manual_seed(4)
    assert orthogonal(torch.zeros(4, 6), dtype).abs().max() == 0  # and not NaN
    g = torch.randn(48, 16)
    common = orthogonal(g, dtype).norm().item()
    for power in range(-45, 16):
        found = orthogonal(g * 10.0**power, dtype).norm().item()
        assert found < (0.1 if power < -21 else 1.1) * common  # false for NaN


def test_one_step_follows_its_definition():
    """Momentum, Nesterov, orthogonal matrices for queries, keys and values, scaled like AdamW's
    updates, and decay, compared with float64 and an SVD, to the accuracy of the iterations."""
    net = build(MUON, 100, CPU)
    optimizer = optim.build(net, MUON)
    lr = optimizer.set_lr(dataclasses.replace(MUON, warmup_steps=0), Progress())
    weights = {name: p.detach().clone().double() for name, p in net.named_parameters()}
    torch.manual_seed(1)
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    optimizer.prepare()
    optimizer.step()
    for name in ("blocks.0.attn.qkv.weight", "blocks.1.proj.weight"):
        p = net.get_parameter(name)
        momentum = 0.05 * p.grad.double()
        assert torch.allclose(optimizer.state[p]["momentum_buffer"].double(), momentum)
        ahead = 0.05 * p.grad.double() + 0.95 * momentum
        before = weights[name].split(32)
        for was, now, of in zip(before, p.detach().split(32), ahead.split(32), strict=True):
            u, _, v = torch.linalg.svd(of, full_matrices=False)
            size = 0.2 * math.sqrt(max(of.shape)) * lr
            wanted = -size * u @ v
            found = now.double() - was * (1 - lr * MUON.weight_decay)
            assert (found - wanted).norm() < 0.2 * wanted.norm()
            assert found.square().mean().sqrt() == pytest.approx(0.2 * lr, rel=0.2)


@pytest.mark.parametrize("c", [MUON, RECIPE], ids=["muon", "autoresearch"])
def test_every_parameter_is_in_one_group(c):
    """Muon has the matrices of the blocks, AdamW all other parameters."""
    net = build(c, 100, CPU)
    *adamw, muon = optim.build(net, c).param_groups
    every = [p for group in (*adamw, muon) for p in group["params"]]
    assert len(every) == len(set(every)) and set(every) == set(net.parameters())
    blocks = {p for name, p in net.named_parameters() if name.startswith("blocks.")}
    assert set(muon["params"]) == {p for p in blocks if p.dim() == 2}
    plain = {p for group in adamw if not group["weight_decay"] for p in group["params"]}
    vectors = {p for p in every if p.dim() < 2}
    assert vectors <= plain if c is RECIPE else vectors == plain


def test_decay_ends_with_the_budget_that_ends_the_run():
    """After half of the tokens, or of the time, half of the decay remains."""
    optimizer = optim.build(build(RECIPE, 100, CPU), RECIPE)
    for budget in ({"max_tokens": 6400}, {"max_time": 50.0}):
        c = dataclasses.replace(RECIPE, steps=10**6, **budget)
        optimizer.set_lr(c, Progress(step=50, tokens=3200, train_s=25.0))
        assert optimizer.param_groups[-1]["weight_decay"] == pytest.approx(0.1)


def test_prepare_changes_no_state():
    """Only `step` changes parameters, momentum and moments."""
    for c in (MUON, RECIPE):
        net = build(c, 100, CPU)
        optimizer = optim.build(net, c)
        for p in net.parameters():
            p.grad = torch.ones_like(p)
        tensors = optim.state_tensors(net, optimizer)
        before = {name: t.clone() for name, t in tensors.items()}
        optimizer.prepare()
        assert all(torch.equal(t, before[name]) for name, t in tensors.items())
        optimizer.step()
        assert not any(torch.equal(t, before[name]) for name, t in tensors.items())


def test_the_work_is_divided_evenly_and_only_by_the_world_size():
    """No rank has more than twice the optimum; for `tiny`, at most a third more than the mean."""
    rng = random.Random(3)
    for world_size in range(1, 20):
        costs = [cost(rng.choice((64, 128, 512)), 128) for _ in range(rng.randint(1, 40))]
        owner = shared_out(costs, world_size)
        assert owner == shared_out(list(costs), world_size) and len(owner) == len(costs)
        loads = [0] * world_size
        for it, rank in zip(costs, owner, strict=True):
            loads[rank] += it
        best = max(max(costs), sum(costs) / world_size)
        assert sum(loads) == sum(costs) and max(loads) <= 2 * best
    tiny = [cost(128, 128)] * 16 + [cost(512, 128)] * 8  # of `tiny`: within a third of the mean
    loads = [0] * 5
    for it, rank in zip(tiny, shared_out(tiny, 5), strict=True):
        loads[rank] += it
    assert max(loads) < 4 / 3 * sum(tiny) / 5
