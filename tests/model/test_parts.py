"""The parts of a modern model, each against what it promises or against plain formulas."""

import dataclasses
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from gptddp.config import Config, with_preset
from gptddp.model import shape
from gptddp.model.attention import Attention, rotate, rotation_of
from gptddp.model.gpt import GPT, build
from gptddp.model.loss import IGNORE, linear_cross_entropy, nats_of_each
from gptddp.model.recipes import role

CPU, T, VOCAB = torch.device("cpu"), 24, 100
SHAPE: dict[str, Any] = dict(n_layer=3, n_head=4, n_embd=32, seq_len=T, precision="fp32")
NEW = ("modern-tiny", "autoresearch")
WINDOW = T // 2


def config(preset: str, **fields: Any) -> Config:
    return with_preset(Config(preset=preset, **SHAPE | fields), accelerator=False)


def model(preset: str, **fields: Any) -> GPT:
    """With no parameter left at 0, where a part would do nothing, and larger than it begins."""
    net = build(config(preset, **fields), VOCAB, CPU)
    generator = torch.Generator().manual_seed(5)
    for name, p in net.named_parameters():
        std = 0.2 if name.startswith("blocks.") and p.dim() == 2 else 0.5
        p.data.copy_(torch.randn(p.shape, generator=generator) * std)
    return net.eval()


def tokens(rows: int = 2, n: int = T) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, n), generator=torch.Generator().manual_seed(2))


# -- rotary positions ------------------------------------------------------------------------------


def test_rotated_scores_depend_on_the_distance_alone():
    """The product of a query at i and a key at j is that at i + s and j + s, and no other's."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 16, generator=generator)

    def score(i: int, j: int) -> float:
        at = [rotate(x, rotation_of(torch.tensor([n]), 16)) for x, n in ((q, i), (k, j))]
        return (at[0] * at[1]).sum().item()

    for i, j in ((0, 0), (5, 2), (9, 1)):
        assert score(i, j) == pytest.approx(score(i + 31, j + 31), abs=1e-4)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3
    assert score(4, 4) == pytest.approx((q * k).sum().item(), abs=1e-5)


def test_rotation_is_that_of_complex_numbers():
    """Channels i and i + size/2 are one complex number, times exp(i p 10000^(-2i/size))."""
    x = torch.randn(1, 2, 7, 8, dtype=torch.float64)
    angles = torch.outer(torch.arange(7.0), 10_000.0 ** -(torch.arange(4.0) / 4)).double()
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    ours = rotate(x.float(), rotation_of(torch.arange(7), 8))
    expected = torch.cat((turned.real, turned.imag), dim=-1).float()
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


# -- what a token sees -----------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["none", "document"])
def test_a_window_ends_at_its_last_token(mask):
    """Of a layer whose window is 12: the token 12 before the last one counts, and 13 before not."""
    c = config("modern-tiny", n_layer=2, windows="S")
    attention = GPT(c, VOCAB).blocks[0].attn
    from gptddp.model.attention import visible

    x = torch.randn(1, T, 32, generator=torch.Generator().manual_seed(3))
    positions = torch.arange(T)[None] if mask == "document" else None
    seen = visible(x[..., 0], positions, shape.window(c, 0))

    def last(changed: int | None) -> torch.Tensor:
        y = x.clone()
        if changed is not None:
            y[0, T - 1 - changed] += 1.0
        with torch.no_grad():
            return attention(y, seen)[0, -1]

    assert not torch.equal(last(WINDOW), last(None))
    for outside in (WINDOW + 1, T - 1):
        assert torch.equal(last(outside), last(None))


def test_windows_follow_the_pattern_and_the_last_layer_sees_all():
    """SSSL over six layers."""
    c = config("autoresearch", n_layer=6)
    assert [shape.window(c, i) for i in range(6)] == [12, 12, 12, None, 12, None]
    assert shape.window(dataclasses.replace(c, n_layer=3), 2) is None


def test_windows_limit_what_the_model_sees_and_its_last_layer_reaches_further():
    """In two layers the first token is seen by the last; without the full one it would not be."""
    net, x = model("modern-tiny", n_layer=2, windows="SL"), tokens(1)
    changed = x.clone()
    changed[0, 0] = (x[0, 0] + 1) % VOCAB
    assert not torch.equal(net(x)[0, -1], net(changed)[0, -1])
    net.windows = [6, 6]  # two layers of 6 reach 12 back
    assert torch.equal(net(x)[0, 13:], net(changed)[0, 13:])
    assert not torch.equal(net(x)[0, 12], net(changed)[0, 12])


@pytest.mark.parametrize("preset", NEW)
def test_documents_in_a_row_have_the_logits_of_each_alone(preset):
    """With rotary positions, windows and value embeddings: three documents, one after the other."""
    net, x = model(preset, windows="SSL", mask="document"), tokens(1)
    lengths = (9, 14, 1)
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        together = net(x, positions=positions)
        alone = torch.cat([net(part) for part in x.split(lengths, dim=1)], dim=1)
        plain = net(x)
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-4)
    assert (together - plain)[0, lengths[0] :].abs().max() > 0.01


@pytest.mark.parametrize("preset", NEW)
def test_no_token_sees_those_after_it(preset):
    """Another last token changes no logits but its own."""
    net, x = model(preset), tokens(1)
    changed = x.clone()
    changed[0, -1] = (x[0, -1] + 1) % VOCAB
    a, b = net(x), net(changed)
    assert torch.equal(a[0, :-1], b[0, :-1]) and not torch.equal(a[0, -1], b[0, -1])


# -- heads -----------------------------------------------------------------------------------------


def test_fewer_heads_of_keys_are_full_attention_with_those_heads_repeated():
    """Two heads of keys and values for four of queries."""
    few = Attention(config("modern-tiny", kv_heads=2), 0)
    full = Attention(config("modern-tiny", kv_heads=4), 0)
    q, k, v = few.qkv.weight.data.split(few.rows)
    wide = [w.view(2, 8, 32).repeat_interleave(2, 0).flatten(0, 1) for w in (k, v)]
    full.qkv.weight.data = torch.cat([q, *wide])
    full.proj.weight.data = few.proj.weight.data
    x, rotation = torch.randn(2, T, 32), rotation_of(torch.arange(T), 8)
    torch.testing.assert_close(few(x, None, rotation), full(x, None, rotation))
    assert few.qkv.weight.numel() < full.qkv.weight.numel()


def test_normed_queries_and_keys_have_no_scale():
    """Rows of the matrix for q and k ten times as large: the same; without the norm, another."""
    x = torch.randn(2, T, 32)
    for qk_norm, same in (("rmsnorm", True), ("none", False)):
        attention = Attention(config("modern-tiny", qk_norm=qk_norm), 0)
        attention.qkv.weight.data.mul_(2)  # far from the eps of the norm
        before = attention(x)
        attention.qkv.weight.data[: 32 + 16] *= 10
        assert torch.allclose(attention(x), before, atol=1e-4) is same


# -- the output ------------------------------------------------------------------------------------


def test_a_softcap_bounds_the_logits():
    """Weights so large that each would be beyond it."""
    net = model("autoresearch", softcap=3.0)
    net.head.weight.data *= 100
    logits = net(tokens())
    assert 2.9 < logits.abs().max() <= 3.0
    net.softcap = 0.0
    assert net(tokens()).abs().max() > 100


@pytest.mark.parametrize("softcap", [0.0, 2.0, 15.0])
def test_the_chunked_loss_with_a_softcap_is_the_plain_formula(softcap):
    """Loss and both gradients in fp32 against autograd in float64, padding and chunks included."""
    generator = torch.Generator().manual_seed(1)
    h, w = (torch.randn(n, 24, generator=generator) for n in (1300, 70))
    y = torch.randint(0, 70, (1300,), generator=generator)
    y[1::7] = IGNORE
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
    """`forward` with targets, `nats`, and the logits of `hidden`, of which a sampler takes one."""
    net, x = model(preset), tokens()
    y = x.roll(-1, 1)
    logits = net.logits(net.hidden(x))
    expected = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum").item()
    assert net(x, y).item() == pytest.approx(expected, rel=1e-5)
    assert net.nats(x, y).sum().item() == pytest.approx(expected, rel=1e-5)
    torch.testing.assert_close(net.logits(net.hidden(x)[0, -1]), logits[0, -1])


def test_an_untied_output_has_weights_of_its_own():
    """Tied, a change of the embedding is one of the output; untied, of the input alone."""
    for head, same in (("tied", True), ("untied", False)):
        net = model("modern-tiny", head=head)
        assert (net.unembedding is net.wte.weight) is same
        h = net.hidden(tokens())
        before = net.logits(h)
        net.wte.weight.data += 1
        assert torch.equal(net.logits(h), before) is not same


# -- the whole -------------------------------------------------------------------------------------


def test_blocks_of_autoresearch_are_the_identity_at_first():
    """Projections of zeros, and the first loss is that of a guess; gates let values through as they
    are."""
    c = config("autoresearch")
    net = build(c, VOCAB, CPU)
    x = torch.randn(2, T, 32)
    values = torch.randn(2, T, 32)
    assert all(torch.equal(block(x, values=values), x) for block in net.blocks)
    rows = len(net.wte.weight)
    loss = net(tokens(), tokens()).item() / tokens().numel()
    assert loss == pytest.approx(torch.tensor(float(rows)).log().item(), rel=1e-3)
    open_ = net.blocks[0].attn
    assert open_.gate is not None and not open_.gate.weight.any()
    open_.proj.weight.data = torch.eye(32)
    without = Attention(config("autoresearch", extras="none"), 0)
    without.load_state_dict({k: v for k, v in open_.state_dict().items() if "gate" not in k})
    seen_first = open_(x, values=values)[:, 0] - without(x)[:, 0]  # the first sees itself alone
    torch.testing.assert_close(seen_first, values[:, 0], rtol=1e-4, atol=1e-5)


def test_value_embeddings_are_on_every_other_layer_and_the_last():
    for n_layer, layers in ((4, ["1", "3"]), (5, ["0", "2", "4"])):
        net = build(config("autoresearch", n_layer=n_layer), VOCAB, CPU)
        assert list(net.value_embeds) == layers
        assert [str(i) for i, b in enumerate(net.blocks) if b.attn.gate is not None] == layers


def test_lambdas_weigh_the_stream_and_the_first_embedding():
    """x0's alone: each layer begins with the embedding; the stream's alone, at 2: powers of two."""
    net = build(config("autoresearch", n_layer=3), VOCAB, CPU).eval()  # blocks are the identity
    first = F.rms_norm(net.wte(tokens()), (32,), eps=1e-6)
    net.ln_f = torch.nn.Identity()
    net.resid_lambdas.data.fill_(2.0)
    net.x0_lambdas.data = torch.tensor([0.0, 0.5, -1.0])
    torch.testing.assert_close(net.hidden(tokens()), ((2 * 1) * 2 + 0.5) * 2 * first - first)


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
    """Of any mixture of options: DDP waits for all of them. None but zeros stay without effect."""
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
    extras = {name for name, it in roles.items() if it in ("resid", "x0")}
    assert len(extras) == (2 if c.extras == "autoresearch" else 0)
    assert all(
        (it in ("vector", "resid", "x0")) is (net.get_parameter(n).dim() == 1)
        for n, it in roles.items()
    )
    inexact = sum(p.numel() for p in net.parameters() if p.dim() == 1)
    gates = sum(p.numel() for n, p in net.named_parameters() if ".gate." in n)
    assert shape.n_params(c, VOCAB) == net.n_params() - inexact - gates


def test_what_the_matrices_of_one_parameter_are():
    """Queries, keys and values; the gate of SwiGLU and what it lets through."""
    net = build(config("modern-tiny", kv_heads=2), VOCAB, CPU)
    assert net.stacked("blocks.0.attn.qkv.weight") == (32, 16, 16)
    assert net.stacked("blocks.0.fc.weight") == (128, 128)
    assert net.stacked("blocks.0.proj.weight") == net.stacked("blocks.2.attn.proj.weight") == (32,)


def test_the_presets_have_the_sizes_that_are_documented():
    """50.3 M as the research trainer reports at depth 8 with its 8192 tokens; 114 M and 0.8 M."""
    with torch.device("meta"):
        for preset, vocab, millions in (("autoresearch", 8192, 50.3), ("modern", 50257, 114.1)):
            c = with_preset(Config(preset=preset), accelerator=True)
            assert GPT(c, vocab).n_params() / 1e6 == pytest.approx(millions, abs=0.05)
    c = with_preset(Config(preset="modern-tiny"), accelerator=False)
    assert shape.n_params(c, 0) / 1e6 == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize("activation", ["gelu", "relu2", "swiglu"])
def test_the_mlp_is_its_formula(activation):
    """In float64; SwiGLU has its gate first."""
    c = config("tiny", activation=activation)
    block = GPT(c, VOCAB).blocks[0].double()
    h = torch.randn(5, sum(block.rows), dtype=torch.float64)
    cubic = (2 / torch.pi) ** 0.5 * (h + 0.044715 * h**3)
    gate, up = h[:, : h.shape[1] // 2], h[:, h.shape[1] // 2 :]
    expected = {
        "gelu": 0.5 * h * (1 + torch.tanh(cubic)),
        "relu2": h.clamp(min=0) ** 2,
        "swiglu": gate / (1 + torch.exp(-gate)) * up,
    }[activation]
    torch.testing.assert_close(block.activated(h), expected)
