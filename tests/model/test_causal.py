"""Attention in blocks of queries equals causal attention, with equal gradients."""

import pytest
import torch

from gptddp.config import Config, with_preset
from gptddp.model import attention, causal
from gptddp.model.gpt import build

LENGTHS = (1, 63, 64, 65, 200, 512, 700)  # blocks of 64 queries, and of 128 from 512 tokens on


def inputs(t, dtype, rows=2, heads=3, size=16):
    generator = torch.Generator().manual_seed(t)
    shape = rows, heads, t, size
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in "qkvg"]


def out_and_gradients(attend, t, dtype):
    *qkv, grad = inputs(t, dtype)
    qkv = [it.requires_grad_() for it in qkv]
    out = attend(*qkv)
    out.backward(grad.to(out.dtype))
    return [out.detach(), *(it.grad for it in qkv)]


def by_definition(q, k, v):
    """Causal attention in float64, with all scores at once."""
    q, k, v = (it.double() for it in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("t", LENGTHS)
def test_blocks_compute_the_definition_of_causal_attention(t, monkeypatch):
    """Output and all three gradients agree, also if a block has only some of the heads."""
    monkeypatch.setattr(causal, "_AT_ONCE", 4 * 64 * min(t, 256))  # of six heads
    for dtype, most in ((torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 2e-2)):
        right = out_and_gradients(by_definition, t, dtype)
        for found, wanted in zip(
            out_and_gradients(causal.causal_attention, t, dtype), right, strict=True
        ):
            error = (found.double() - wanted.double()).norm() / (wanted.double().norm() + 1e-3)
            assert error < most, (dtype, found.shape)


def test_scores_that_are_computed_again_have_the_same_bits(monkeypatch):
    """Keeping scores for the backward pass saves time, and changes no bit."""
    kept = out_and_gradients(causal.causal_attention, 200, torch.bfloat16)
    monkeypatch.setattr(causal, "_KEPT", 0)
    again = out_and_gradients(causal.causal_attention, 200, torch.bfloat16)
    assert all(map(torch.equal, kept, again))


@pytest.mark.parametrize("preset", ["tiny", "modern-tiny"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_has_the_same_loss_and_gradients_either_way(preset, precision, monkeypatch):
    """The results differ only by rounding; only a model with attention "blocks" uses blocks."""
    used = []
    monkeypatch.setattr(
        attention, "causal_attention", lambda *qkv: used.append(1) or causal.causal_attention(*qkv)
    )
    x = torch.randint(0, 256, (2, 256), generator=torch.Generator().manual_seed(0))
    found = {}
    for kind in ("fused", "blocks"):
        c = with_preset(Config(preset=preset, attention=kind), accelerator=False)
        net = build(c, 256, torch.device("cpu"))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = net(x, x.roll(-1, 1)) / x.numel()
        loss.backward()
        gradient = torch.cat([p.grad.flatten() for p in net.parameters()])
        found[kind] = loss.item(), gradient
        assert len(used) == (c.n_layer if kind == "blocks" else 0)
    most = 1e-5 if precision == "fp32" else 2e-2
    assert found["blocks"][0] == pytest.approx(found["fused"][0], rel=most / 10)
    wanted = found["fused"][1]
    assert (found["blocks"][1] - wanted).norm() < most * wanted.norm()


@pytest.mark.parametrize("field", [{"mask": "document"}, {"dropout": 0.5}])
def test_a_mask_and_dropout_use_the_fused_kernel(field):
    """Blocks support neither: a model with one of them is computed as without blocks."""
    x = torch.randint(0, 256, (1, 64), generator=torch.Generator().manual_seed(0))
    two_documents = torch.arange(32).repeat(2)[None]
    found = []
    for kind in ("fused", "blocks"):
        shape = Config(attention=kind, seq_len=64, n_layer=1, **field)
        net = build(with_preset(shape, accelerator=False), 256, torch.device("cpu"))
        torch.manual_seed(0)
        found.append(net(x, x, two_documents if "mask" in field else None))
    assert torch.equal(*found)
