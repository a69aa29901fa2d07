"""Causal self-attention: heads, rotary positions, and the mask of visible tokens."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gptddp.config import Config
from gptddp.model.causal import causal_attention
from gptddp.shape import GATE_CHANNELS, has_value_embedding, head_size

EPS = 1e-6  # of every RMSNorm, as in Llama 2
Rotation = tuple[Tensor, Tensor]  # cosines and sines of positions: fp32 (T, head size / 2) each


class LayerCache:
    """Keys and values of a layer's earlier tokens, so that each new token costs one token's work.

    The buffer for `capacity` tokens is made at first use. Pope et al. 2022, "Efficiently Scaling
    Transformer Inference", section 2.1.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._both: Tensor | None = None  # (2, rows, heads, capacity, head width)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add the next t tokens' keys and values (rows, heads, t, head width); return all so far.

        Only the first call may add several tokens: torch's causal mask is square.
        """
        t, begin = k.shape[2], self.length
        if self._both is None:
            rows, heads, _, width = k.shape
            self._both = torch.empty(
                2, rows, heads, self.capacity, width, dtype=k.dtype, device=k.device
            )
        self.length = begin + t
        self._both[0, :, :, begin : self.length] = k
        self._both[1, :, :, begin : self.length] = v
        keys, values = self._both[:, :, :, : self.length]
        return keys, values


class Attention(nn.Module):
    """Causal multi-head self-attention, in blocks of queries or through torch's fused kernel."""

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.n_head, self.kv_heads, self.dropout = c.n_head, c.kv_heads, c.dropout
        self.in_blocks = c.attention == "blocks"
        self.head_size, self.qk_norm = head_size(c), c.qk_norm == "rmsnorm"
        self.rows = (c.n_embd, c.kv_heads * self.head_size, c.kv_heads * self.head_size)
        bias = c.norm == "layernorm"
        self.qkv = nn.Linear(c.n_embd, sum(self.rows), bias=bias)
        self.proj = nn.Linear(c.n_embd, c.n_embd, bias=bias)
        self.gate = None
        if has_value_embedding(c, layer):
            self.gate = nn.Linear(min(GATE_CHANNELS, c.n_embd), c.kv_heads, bias=False)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rotation: Rotation | None = None,
        values: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """x (rows, T, width) -> the same shape; mask bool (rows or 1, 1, T, T): visible tokens.

        Without a mask a token sees itself and all earlier tokens, those in the cache included. With
        a cache a mask has more columns, for its tokens. values (rows, T, kv_heads * head size): the
        value embeddings of the tokens, for a layer that has a gate.
        """
        b, t, width = x.shape
        qkv = self.qkv(x)
        gate = None if self.gate is None else self.gate(x[..., : self.gate.in_features])
        dropout = self.dropout if self.training else 0.0
        in_blocks = self.in_blocks and mask is None and cache is None and not dropout
        # torch's fused kernel for CPUs runs backward 1.5 times faster in fp32 than in bf16.
        device = x.device.type
        fp32 = device == "cpu" and not in_blocks
        with torch.autocast(device, enabled=False) if fp32 or in_blocks else nullcontext():
            qkv = qkv.float() if fp32 else qkv
            q, k, v = (
                part.view(b, t, -1, self.head_size).transpose(1, 2)
                for part in qkv.split(self.rows, dim=-1)
            )
            if gate is not None and values is not None:
                v = v + _gated(values, gate, v)
            if rotation is not None:
                q, k = rotate(q, rotation), rotate(k, rotation)
            if self.qk_norm:
                q, k = (F.rms_norm(it, it.shape[-1:], eps=EPS).to(v.dtype) for it in (q, k))
            if cache is not None:
                k, v = cache.extend(k, v)
            if self.kv_heads < self.n_head:
                k, v = (it.repeat_interleave(self.n_head // self.kv_heads, 1) for it in (k, v))
            if in_blocks:
                y = causal_attention(q, k, v)
            else:
                causal = mask is None and k.shape[2] == t  # else a single token sees the cache
                y = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout
                )
        out: Tensor = self.proj(y.transpose(1, 2).reshape(b, t, width))
        return out


def _gated(values: Tensor, gate: Tensor, v: Tensor) -> Tensor:
    """The addend to v (rows, kv_heads, T, head size); a gate of 0, the initial value, scales by 1.

    "Value residual learning", Zhou et al. 2024, with separate embeddings and a gate per head.
    """
    b, kv_heads, t, size = v.shape
    open_ = 2 * torch.sigmoid(gate.float()).transpose(1, 2)[..., None]
    out: Tensor = (open_ * values.view(b, t, kv_heads, size).transpose(1, 2)).to(v.dtype)
    return out


def rotation_of(positions: Tensor, size: int, base: float = 10_000.0) -> Rotation:
    """The angles for heads of `size` channels; positions (T,) int64.

    "RoFormer", Su et al. 2021, section 3.4.2, with its base. They are computed in every forward
    pass, in fp32: this takes 0.2 ms of a step, and needs no buffers, which DDP would broadcast.
    """
    steps = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device)
    angles = positions[:, None].float() * base ** (-steps / size)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate x (rows, heads, T, head size): channel i together with channel i + size / 2."""
    (one, two), (cos, sin) = x.float().chunk(2, dim=-1), by
    turned = torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)
    return turned.to(x.dtype)


def visible(
    x: Tensor, positions: Tensor | None, window: int | None, before: int = 0
) -> Tensor | None:
    """The mask of visible tokens, bool (rows or 1, 1, T, before + T); None: plain causal.

    x (rows, T): the tokens, after `before` others; positions as in `GPT.forward`; window as in
    `shape.window`.
    """
    columns = before + x.size(1)
    seen = None
    if positions is not None:  # the tokens of its document up to itself
        segments = (positions == 0).cumsum(1)
        seen = (segments[:, None, :, None] == segments[:, None, None, :]).tril()
    if window is None or window >= columns - 1:
        return seen
    places = torch.arange(columns, device=x.device)
    mine = places[before:, None]  # only compared: a difference would take 8 bytes per pair
    near = ((places <= mine) & (places >= mine - window))[None, None]
    return near if seen is None else seen & near
