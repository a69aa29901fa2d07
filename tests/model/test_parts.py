"""Properties of the parts of a model.

Formulas of whole models check their arithmetic: `test_recipe.py` here, `test_llama.py` and
`test_export.py` elsewhere.
"""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from gptddp import shape
from gptddp.config import Config, with_preset
from gptddp.model.gpt import GPT, build
from gptddp.model.loss import IGNORE, linear_cross_entropy, nats_of_each
from gptddp.model.recipes import role

CPU, T, VOCAB = torch.device("cpu"), 24, 100
SHAPE: dict[str, Any] = dict(n_layer=3, n_head=4, n_embd=32, seq_len=T, precision="fp32")
NEW = ("modern-tiny", "autoresearch")


def config(preset: str, **fields: Any) -> Config:
    return with_preset(Config(preset=preset, **SHAPE | fields), accelerator=False)


def model(preset: str, **fields: Any) -> GPT:
    """A model with larger initial parameters, none of them 0, so that every part has an effect."""
    net = build(config(preset, **fields), VOCAB, CPU)
    generator = torch.Generator().manual_seed(5)
    for name, p in net.named_parameters():
        std = 0.2 if name.startswith("blocks.") and p.dim() == 2 else 0.5
        p.data.copy_(torch.randn(p.shape, generator=generator) * std)
    return net.eval()


def tokens(rows: int = 2, n: int = T) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, n), generator=torch.Generator().manual_seed(2))


# -- visible tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", NEW)
def test_documents_in_a_row_have_the_logits_of_each_alone(preset):
    """The logits of three documents agree, with rotary positions, windows and value embeddings."""
    net, x = model(preset, windows="SSL", mask="document"), tokens(1)
    lengths = (9, 14, 1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        together = net(x, positions=positions)
        alone = torch.cat([net(part) for part in x.split(lengths, dim=1)], dim=1)
        plain = net(x)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert (together - plain)[0, lengths[0] :].abs().max() > 0.01


# -- the output ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "softcap"), [(1, 0.0), (511, 0.0), (512, 0.0), (1300, 0.0), (1300, 2.0), (1300, 15.0)]
)
def test_the_chunked_loss_matches_the_plain_formula(n, softcap):
    """Loss and both gradients in fp32 agree with autograd in float64, with padding and chunks.
    Without a valid target, as with a single row here, they are 0 and not NaN."""
    generator = torch.Generator().manual_seed(1)
    h, w = (torch.randn(rows, 24, generator=generator) for rows in (n, 70))
    y = torch.randint(0, 70, (n,), generator=generator)
    y[::7] = IGNORE
    ours = [t.clone().requires_grad_() for t in (h, w)]
    plain = [t.double().requires_grad_() for t in (h, w)]
    loss = linear_cross_entropy(*ours, y, softcap)
    (loss * 0.25).backward()
    z = plain[0] @ plain[1].t()
    z = softcap * torch.tanh(z / softcap) if softcap else z
    each = F.cross_entropy(z, y, ignore_index=IGNORE, reduction="none")
    (each.sum() * 0.25).backward()
    assert loss.item() == pytest.approx(each.sum().item(), rel=1e-6)
    for a, b in zip(ours, plain, strict=True):
        assert (a.grad - b.grad).norm() <= 1e-5 * b.grad.norm()
    torch.testing.assert_close(
        nats_of_each(h, w, y, softcap).double(), each.detach(), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("preset", NEW)
def test_training_evaluation_and_sampling_have_the_same_loss(preset):
    """`forward` with targets, `nats`, and the logits of `hidden` give the same loss."""
    net, x = model(preset), tokens()
    y = x.roll(-1, 1)
    logits = net.logits(net.hidden(x))
    expected = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").item()
    assert net(x, y).item() == pytest.approx(expected, rel=1e-5)
    assert net.nats(x, y).sum().item() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(net.logits(net.hidden(x)[0, -1]), logits[0, -1])


# -- the whole -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        dict(preset="tiny"),
        dict(preset="modern-tiny"),
        dict(preset="autoresearch"),
        dict(preset="tiny", positions="rope", activation="relu2", head="untied", softcap=5.0),
        dict(preset="tiny", kv_heads=1, qk_norm="rmsnorm", windows="SL", extras="autoresearch",
             head="untied"),
        dict(preset="autoresearch", positions="learned", extras="none", norm="layernorm"),
    ],
)  # fmt: skip
def test_every_parameter_gets_a_gradient_and_has_a_role(fields):
    """DDP waits for the gradients of all parameters, so each has one with any options."""
    c = config(**fields)
    net = build(c, VOCAB, CPU)
    net(tokens(), tokens()).backward()
    for name, p in net.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name
        if p.dim() == 2:
            assert sum(net.stacked(name)) == len(p)
    tied = net.head is None
    roles = {name: role(name, p.dim(), tied) for name, p in net.named_parameters()}
    assert {name for name, it in roles.items() if it == "matrix"} == {
        name for name, p in net.named_parameters() if name.startswith("blocks.") and p.dim() == 2
    }
    assert roles["wte.weight"] == ("head" if tied else "embedding")
    assert roles.get("wpe.weight", "head") == "head"
    extras = {name for name, it in roles.items() if it in ("resid", "x0")}
    assert len(extras) == (2 if c.extras == "autoresearch" else 0)
    assert all(
        (it in ("vector", "resid", "x0")) is (net.get_parameter(n).dim() == 1)
        for n, it in roles.items()
    )
    inexact = sum(p.numel() for p in net.parameters() if p.dim() == 1)
    gates = sum(p.numel() for n, p in net.named_parameters() if ".gate." in n)
    assert shape.n_params(c, VOCAB) == net.n_params() - inexact - gates


def test_a_parameter_names_its_stacked_matrices():
    """The parts of a parameter are queries, keys and values, or SwiGLU's gate and gated part."""
    net = build(config("modern-tiny", kv_heads=2), VOCAB, CPU)
    assert net.stacked("blocks.0.attn.qkv.weight") == (32, 16, 16)
    assert net.stacked("blocks.0.fc.weight") == (128, 128)
    assert net.stacked("blocks.0.proj.weight") == net.stacked("blocks.2.attn.proj.weight") == (32,)


def test_the_presets_have_the_documented_sizes():
    """`autoresearch` has 50.3 M, as reported for depth 8 and 8192 tokens, `modern` 114 M,
    `modern-tiny` 0.8 M, and `gpt2` the published size (50257 tokens, padded to 64s)."""
    with torch.device("meta"):
        published = with_preset(Config(preset="gpt2"), accelerator=True)
        assert GPT(published, 50257).n_params() == 124_439_808 + 47 * 768
        for preset, vocab, millions in (("autoresearch", 8192, 50.3), ("modern", 50257, 114.1)):
            c = with_preset(Config(preset=preset), accelerator=True)
            assert GPT(c, vocab).n_params() / 1e6 == pytest.approx(millions, abs=0.05)
            if preset == "autoresearch":
                assert (c.n_head, c.kv_heads, c.seq_len) == (4, 4, 2048)
                assert c.batch * c.seq_len == 2**19 and c.eval_tokens == 40 * 2**19
    c = with_preset(Config(preset="modern-tiny"), accelerator=False)
    assert shape.n_params(c, 0) / 1e6 == pytest.approx(0.8, abs=0.05)
