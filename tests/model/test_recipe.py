"""Model and training of the preset `autoresearch` against plain formulas."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from gptddp.config import Config, with_preset
from gptddp.model import optim
from gptddp.model.gpt import build
from gptddp.model.muon import orthogonal
from gptddp.run.progress import Progress

CPU, VOCAB, T, WIDTH = torch.device("cpu"), 128, 20, 48


def config(n_head: int, kv_heads: int, n_layer: int, steps: int = 400) -> Config:
    fields = dict(n_head=n_head, kv_heads=kv_heads, n_layer=n_layer, n_embd=WIDTH, seq_len=T)
    c = Config(preset="autoresearch", steps=steps, precision="fp32", **fields)
    return with_preset(c, accelerator=False)


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def turned(x: Tensor) -> Tensor:
    """x (rows, T, heads, size): rotate channels i and i + size / 2 as complex numbers."""
    half = x.shape[-1] // 2
    angles = torch.outer(
        torch.arange(T).double(), 10_000.0 ** -(torch.arange(half).double() / half)
    )
    z = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles)[:, None, :]
    return torch.cat((z.real, z.imag), -1)


def attended(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """q, k, v (rows, T, heads, size), with fewer heads in k and v; one head after the other."""
    distance = torch.arange(T)[:, None] - torch.arange(T)
    unseen, each = (distance < 0) | (distance > window), q.shape[2] // k.shape[2]
    out = []
    for head in range(q.shape[2]):
        mine = q[:, :, head] @ k[:, :, head // each].mT / math.sqrt(q.shape[3])
        weights = mine.masked_fill(unseen, -math.inf).softmax(-1)
        out.append(weights @ v[:, :, head // each])
    return torch.cat(out, -1)


def formula(p: dict[str, Tensor], c: Config, x: Tensor) -> Tensor:
    """The logits, from weights in float64."""
    size = c.n_embd // c.n_head
    h = first = rms(p["wte.weight"][x])
    for i in range(c.n_layer):
        b, last = f"blocks.{i}.", i == c.n_layer - 1
        h = p["resid_lambdas"][i] * h + p["x0_lambdas"][i] * first
        n = rms(h)
        heads = [c.n_head * size, c.kv_heads * size, c.kv_heads * size]
        parts = (n @ p[b + "attn.qkv.weight"].T).split(heads, -1)
        q, k, v = (part.view(*x.shape, -1, size) for part in parts)
        if (c.n_layer - 1 - i) % 2 == 0:
            gate = 2 * torch.sigmoid(n[..., :32] @ p[b + "attn.gate.weight"].T)
            v = v + gate[..., None] * p[f"value_embeds.{i}.weight"][x].view(v.shape)
        window = T if last or "SSSL"[i % 4] == "L" else T // 2
        h = h + attended(rms(turned(q)), rms(turned(k)), v, window) @ p[b + "attn.proj.weight"].T
        h = h + (rms(h) @ p[b + "fc.weight"].T).clamp(min=0).square() @ p[b + "proj.weight"].T
    return 15 * torch.tanh(rms(h) @ p["head.weight"].T / 15)


@pytest.mark.parametrize("attention", ["blocks", "fused"])
@pytest.mark.parametrize(("n_head", "kv_heads", "n_layer"), [(2, 2, 4), (4, 2, 5), (6, 1, 1)])
def test_the_model_matches_its_formula(n_head, kv_heads, n_layer, attention):
    """Logits, loss and each parameter's gradient agree with the formula and autograd in float64."""
    c = dataclasses.replace(config(n_head, kv_heads, n_layer), attention=attention)
    net, generator = build(c, VOCAB, CPU), torch.Generator().manual_seed(6)
    for p in net.parameters():  # no parameter is 0, and all lambdas differ
        p.data.copy_(torch.randn(p.shape, generator=generator) * (0.2 if p.dim() > 1 else 1.0))
    plain = {n: p.detach().double().requires_grad_() for n, p in net.named_parameters()}
    x, y = torch.randint(0, VOCAB, (2, 3, T), generator=generator)
    logits = formula(plain, c, x)
    torch.testing.assert_close(net(x).double(), logits, rtol=1e-4, atol=1e-4)
    loss = -logits.log_softmax(-1).gather(-1, y[..., None]).sum()
    ours = net(x, y)
    assert ours.item() == pytest.approx(loss.item(), rel=1e-5)
    ours.backward()
    loss.backward()
    for name, p in net.named_parameters():
        wanted = plain[name].grad
        assert wanted is not None and wanted.norm() > 0, name
        assert (p.grad - wanted).norm() < 1e-4 * wanted.norm(), name


def test_the_initial_weights_have_the_documented_distributions():
    """N(0, 1) for embeddings and N(0, 0.001) for the head; matrices and value embeddings uniform
    with a standard deviation of 1 / sqrt(width); lambdas of 1 and 0.1; zeros elsewhere."""
    c = config(4, 4, 2)
    net = build(c, 8192, CPU)
    uniform = 1 / math.sqrt(WIDTH)
    for name, p in net.named_parameters():
        std, mean = p.std().item(), p.mean().item()
        if "lambdas" in name:
            assert (p == (1.0 if name == "resid_lambdas" else 0.1)).all()
        elif name.endswith(("proj.weight", "gate.weight")):
            assert not p.any(), name
        else:
            wanted = {"wte.weight": 1.0, "head.weight": 0.001}.get(name, uniform)
            assert std == pytest.approx(wanted, rel=0.03), name
            assert abs(mean) < 0.05 * wanted
            if wanted == uniform:
                assert p.abs().max() <= math.sqrt(3) * uniform


class Adam:
    """Adam as published, in float64."""

    def __init__(self, rate: float, betas: tuple[float, float]) -> None:
        self.rate, self.betas, self.step, self.m, self.v = rate, betas, 0, 0.0, 0.0

    def update(self, g: Tensor, w: Tensor, part: float, done: float) -> Tensor:
        self.step += 1
        one, two = self.betas
        self.m = one * self.m + (1 - one) * g.double()
        self.v = two * self.v + (1 - two) * g.double() ** 2
        m, v = self.m / (1 - one**self.step), self.v / (1 - two**self.step)
        return self.rate * part * m / (v.sqrt() + 1e-10)


class NorMuon:
    """One matrix. Its update comes from our iterations on its momentum, rounded to bf16."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.momentum, self.variance, self.step = torch.zeros(shape), 0.0, 0

    def update(self, g: Tensor, w: Tensor, part: float, done: float) -> Tensor:
        beta = 0.85 + 0.1 * min(1.0, self.step / 300)
        self.step += 1
        self.momentum = self.momentum.lerp(g, 1 - beta)
        made = orthogonal(g.lerp(self.momentum, beta), torch.float32).bfloat16().double()
        rows, columns = g.shape
        square = made.square().mean(1 if rows >= columns else 0, keepdim=True)
        self.variance = 0.95 * self.variance + 0.05 * square
        even = made / self.variance.sqrt()
        even *= made.norm() / even.norm()
        decayed = torch.where(even * w >= 0, 0.2 * (1 - done) * w, 0.0)
        return 0.04 * part * math.sqrt(max(1.0, rows / columns)) * (even + decayed)


def rule(name: str, shape: tuple[int, int]) -> Adam | NorMuon:
    wide = math.sqrt(768 / WIDTH)
    if name.startswith("blocks."):
        return NorMuon(shape)
    if name == "x0_lambdas":
        return Adam(0.5, (0.96, 0.95))
    rates = {"resid_lambdas": 0.005, "head": 0.004 * wide}
    return Adam(rates.get(name.split(".")[0], 0.6 * wide), (0.8, 0.95))


def test_training_matches_its_formula():
    """Each parameter agrees after each of forty steps; in the second half the rates fall.

    The gradients are given, so that no error is amplified; they have many magnitudes.
    """
    steps = 40
    c = config(4, 2, 2, steps)
    net = build(c, VOCAB, CPU)
    optimizer = optim.build(net, c)
    wanted, rules = {}, {}
    for name, p in net.named_parameters():
        heads = [WIDTH, WIDTH // 2, WIDTH // 2] if ".qkv." in name else [len(p)]
        wanted[name] = p.detach().double()
        rules[name] = [rule(name, part.shape) for part in p.split(heads)], heads
    generator = torch.Generator().manual_seed(7)
    for step in range(steps):
        done = step / steps
        for name, p in net.named_parameters():
            p.grad = torch.randn(p.shape, generator=generator) * 10.0 ** (step % 7 - 4)
            mine, heads = rules[name]
            parts = zip(mine, p.grad.split(heads), wanted[name].split(heads), strict=True)
            rate = min(1.0, 2 * (1 - done))
            wanted[name] -= torch.cat([it.update(g, w, rate, done) for it, g, w in parts])
        optimizer.set_lr(c, Progress(step=step))
        optimizer.prepare()
        optimizer.step()
        for name, p in net.named_parameters():
            error = (p.detach() - wanted[name]).norm()
            assert error < 2e-5 * wanted[name].norm(), (step, name)
