"""GPT-2 as published: learned positions, pre-LayerNorm blocks, GELU (tanh), tied embeddings.

Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; the initialisation
(N(0, 0.02), residual projections scaled by 1/sqrt(2 n_layer)) is in its section 2.3.
"""

import math
import os
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gptddp.config import Config
from gptddp.errors import ConfigError
from gptddp.model.kv_cache import KVCache, LayerCache
from gptddp.model.loss import linear_cross_entropy, nats_of_each


class Attention(nn.Module):
    """Causal multi-head self-attention, through torch's fused kernel."""

    def __init__(self, c: Config):
        super().__init__()
        self.n_head, self.dropout = c.n_head, c.dropout
        self.qkv = nn.Linear(c.n_embd, 3 * c.n_embd)
        self.proj = nn.Linear(c.n_embd, c.n_embd)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """x (rows, T, width) -> the same shape; mask bool (rows, 1, T, T): what each token sees.

        Without a mask a token sees itself and all tokens before it, those of the cache included.
        """
        b, t, width = x.shape
        qkv = self.qkv(x)
        # torch's fused kernel for CPUs runs backward 1.5 times faster in fp32 than in bf16.
        on_cpu = x.device.type == "cpu"
        with torch.autocast("cpu", enabled=False) if on_cpu else nullcontext():
            qkv = qkv.float() if on_cpu else qkv
            q, k, v = qkv.view(b, t, 3, self.n_head, -1).permute(2, 0, 3, 1, 4)
            if cache is not None:
                k, v = cache.extend(k, v)
            causal = mask is None and k.shape[2] == t  # else one token, which sees all in the cache
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout
            )
        out: Tensor = self.proj(y.transpose(1, 2).reshape(b, t, width))
        return out


class TransformerBlock(nn.Module):
    """Attention and an MLP, each behind a LayerNorm and with a residual connection."""

    def __init__(self, c: Config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(c.n_embd)
        self.attn = Attention(c)
        self.ln_2 = nn.LayerNorm(c.n_embd)
        self.fc = nn.Linear(c.n_embd, 4 * c.n_embd)
        self.proj = nn.Linear(4 * c.n_embd, c.n_embd)
        self.dropout = nn.Dropout(c.dropout)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, cache: LayerCache | None = None
    ) -> Tensor:
        """x (rows, T, width) -> the same shape; mask and cache: see Attention."""
        x = x + self.dropout(self.attn(self.ln_1(x), mask, cache))
        x = x + self.dropout(self.proj(F.gelu(self.fc(self.ln_2(x)), approximate="tanh")))
        return x


class GPT(nn.Module):
    """Token ids (rows, T) int64 -> logits (rows, T, vocab), or the summed loss with targets."""

    def __init__(self, c: Config, vocab_size: int):
        super().__init__()
        self.seq_len = c.seq_len
        # A multiple of 64 keeps the largest matrix multiplication on the fast path of every BLAS;
        # the rows that are added are never a target. Trained weights have none to add: all logits
        # of GPT-2 may lie far below 0, which is what a row of noise would have.
        rows = vocab_size if c.init_sha256 else -(-vocab_size // 64) * 64
        self.wte = nn.Embedding(rows, c.n_embd)
        self.wpe = nn.Embedding(c.seq_len, c.n_embd)
        self.dropout = nn.Dropout(c.dropout)
        blocks = [TransformerBlock(c) for _ in range(c.n_layer)]
        self.blocks = nn.ModuleList(blocks)
        self.ln_f = nn.LayerNorm(c.n_embd)
        self.apply(self._init)
        for block in blocks:
            for proj in (block.attn.proj, block.proj):
                nn.init.normal_(proj.weight, std=0.02 / math.sqrt(2 * c.n_layer))

    @staticmethod
    def _init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(
        self, x: Tensor, y: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Logits; with targets y (rows, T), IGNORE where padded, the summed loss in nats, fp32.

        positions (rows, T) int64: of each token in its document, from 0. With them no token sees
        another document than its own. Raises RuntimeError for targets without gradients.
        """
        h = self.hidden(x, positions)
        if y is None:
            return F.linear(h, self.wte.weight)
        return linear_cross_entropy(h.flatten(0, 1), self.wte.weight, y.flatten())

    def hidden(
        self, x: Tensor, positions: Tensor | None = None, cache: KVCache | None = None
    ) -> Tensor:
        """What the output projection gets, (rows, T, width); x and positions as in `forward`.

        cache: of the tokens before x, which it takes in; not with positions.
        """
        first = cache.length if cache else 0
        rows = slice(first, first + x.size(1))
        position = self.wpe.weight[rows] if positions is None else self.wpe(positions)
        mask = None if positions is None else within_documents(positions)
        h = self.dropout(self.wte(x) + position)
        for i, block in enumerate(self.blocks):
            h = block(h, mask, cache.layers[i] if cache else None)
        out: Tensor = self.ln_f(h)
        return out

    def nats(self, x: Tensor, y: Tensor, positions: Tensor | None = None) -> Tensor:
        """The loss of each target in nats, fp32 (rows, T), 0 where y is IGNORE; no gradients."""
        h = self.hidden(x, positions).flatten(0, 1)
        return nats_of_each(h, self.wte.weight, y.flatten()).view(y.shape)

    def n_params(self) -> int:
        """Parameters, the tied head counted once."""
        return sum(p.numel() for p in self.parameters())


def within_documents(positions: Tensor) -> Tensor:
    """What each token may see, bool (rows, 1, T, T): the tokens of its document up to itself."""
    segments = (positions == 0).cumsum(1)
    same = segments[:, None, :, None] == segments[:, None, None, :]
    return same.tril()


def check_size(c: Config, vocab_size: int, device: torch.device) -> None:
    """Raise ConfigError where weights, gradients and moments are more than all of the memory."""
    parameters = 12 * c.n_layer * c.n_embd**2 + (vocab_size + c.seq_len) * c.n_embd
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
    if 16 * parameters > memory_bytes:  # four numbers in fp32
        raise ConfigError(
            f"a model of n_layer {c.n_layer}, n_embd {c.n_embd} and seq_len {c.seq_len} has "
            f"{parameters:.2g} parameters and needs {16 * parameters / 2**30:.1f} GiB, of which "
            f"there are {memory_bytes / 2**30:.1f}: lower one of them"
        )


def shapes(c: Config, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """Of the model's parameters, by name; without their memory."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in GPT(c, vocab_size).named_parameters()}


def build(c: Config, vocab_size: int, device: torch.device) -> GPT:
    """The model with the weights that `seed` gives: the same on every rank and device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(c.seed)
        return GPT(c, vocab_size).to(device)
