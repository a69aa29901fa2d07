"""One block of a transformer: attention and an MLP, each after a norm, with residuals."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gptddp.config import Config
from gptddp.model.attention import EPS, Attention, LayerCache, Rotation
from gptddp.shape import mlp_width


class TransformerBlock(nn.Module):
    """Attention and an MLP, each after a norm and with a residual connection."""

    def __init__(self, c: Config, layer: int):
        super().__init__()
        self.activation, bias = c.activation, c.norm == "layernorm"
        width = mlp_width(c)
        # for SwiGLU: the gate's rows, then the gated rows
        self.rows = (width, width) if c.activation == "swiglu" else (width,)
        self.ln_1 = norm(c)
        self.attn = Attention(c, layer)
        self.ln_2 = norm(c)
        self.fc = nn.Linear(c.n_embd, sum(self.rows), bias=bias)
        self.proj = nn.Linear(width, c.n_embd, bias=bias)
        self.dropout = nn.Dropout(c.dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rotation: Rotation | None = None,
        values: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """x (rows, T, width) -> the same shape; other arguments: see Attention."""
        x = x + self.dropout(self.attn(self.ln_1(x), mask, rotation, values, cache))
        x = x + self.dropout(self.proj(self.activated(self.fc(self.ln_2(x)))))
        return x

    def activated(self, h: Tensor) -> Tensor:
        """GELU by tanh; ReLU squared (So et al. 2021, "Primer"); SwiGLU (Shazeer 2020)."""
        if self.activation == "gelu":
            return F.gelu(h, approximate="tanh")
        if self.activation == "relu2":
            return F.relu(h).square()
        gate, up = h.chunk(2, dim=-1)
        return F.silu(gate) * up


def norm(c: Config) -> nn.Module:
    """LayerNorm, or RMSNorm (Zhang and Sennrich 2019) without weights."""
    if c.norm == "rmsnorm":
        return nn.RMSNorm(c.n_embd, eps=EPS, elementwise_affine=False)
    return nn.LayerNorm(c.n_embd)


def normed(x: Tensor) -> Tensor:
    """RMSNorm without weights over the last dimension."""
    return F.rms_norm(x, x.shape[-1:], eps=EPS)


def capped(logits: Tensor, softcap: float) -> Tensor:
    """Logits; if softcap is not 0, in fp32 and within +-softcap (Gemma 2, 2024, section 2)."""
    return softcap * torch.tanh(logits.float() / softcap) if softcap else logits
