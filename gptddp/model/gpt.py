"""A GPT, by configuration as GPT-2 was published or with the parts of present models.

GPT-2 (Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"): learned
positions, pre-LayerNorm blocks, GELU (tanh), tied embeddings. A modern one: rotary positions,
RMSNorm, SwiGLU, fewer key and value heads, normalised queries and keys.
"""

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gptddp import shape
from gptddp.config import Config
from gptddp.errors import ConfigError
from gptddp.model.attention import LayerCache, rotation_of, visible
from gptddp.model.block import TransformerBlock, capped, norm, normed
from gptddp.model.loss import linear_cross_entropy, nats_of_each


class GPT(nn.Module):
    """Token ids (rows, T) int64 -> logits (rows, T, vocab), or the summed loss with targets."""

    def __init__(self, c: Config, vocab_size: int):
        super().__init__()
        self.seq_len, self.softcap, self.head_size = c.seq_len, c.softcap, shape.head_size(c)
        self.windows = [shape.window(c, layer) for layer in range(c.n_layer)]
        # Trained weights get no additional rows: all logits of GPT-2 may be far below 0, while a
        # row of noise has logits near 0.
        rows = vocab_size if c.init_sha256 else shape.padded(vocab_size)
        kv_width = c.kv_heads * self.head_size
        self.wte = nn.Embedding(rows, c.n_embd)
        self.wpe = nn.Embedding(c.seq_len, c.n_embd) if c.positions == "learned" else None
        self.dropout = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(c, layer) for layer in range(c.n_layer))
        self.ln_f = norm(c)
        self.head = nn.Linear(c.n_embd, rows, bias=False) if c.head == "untied" else None
        self.extras = c.extras == "autoresearch"
        if self.extras:
            layers = [i for i in range(c.n_layer) if shape.has_value_embedding(c, i)]
            self.value_embeds = nn.ModuleDict(
                {str(i): nn.Embedding(rows, kv_width) for i in layers}
            )
            self.resid_lambdas = nn.Parameter(torch.ones(c.n_layer))
            self.x0_lambdas = nn.Parameter(torch.zeros(c.n_layer))
        (_as_autoresearch if self.extras else _as_gpt2)(self, c)

    def forward(
        self, x: Tensor, y: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Logits; with targets y (rows, T), IGNORE in padding, the summed loss in nats, fp32.

        positions (rows, T) int64: of each token in its document, from 0. With positions a token
        sees only its own document. Raises RuntimeError for targets while gradients are off.
        """
        h = self.hidden(x, positions)
        if y is None:
            return self.logits(h)
        return linear_cross_entropy(h.flatten(0, 1), self.unembedding, y.flatten(), self.softcap)

    def hidden(
        self, x: Tensor, positions: Tensor | None = None, cache: Sequence[LayerCache] | None = None
    ) -> Tensor:
        """The input of the output projection, (rows, T, width); x and positions as in `forward`.

        cache: one per layer, with the tokens before x; x is added to it. Not with positions.
        """
        h, rotation, before = self.wte(x), None, cache[0].length if cache else 0
        if self.wpe is None:
            # Scores depend only on distances, so these positions also serve masked documents.
            places = torch.arange(before, before + x.size(1), device=x.device)
            rotation = rotation_of(places, self.head_size)
        elif positions is None:
            h = h + self.wpe.weight[before : before + x.size(1)]
        else:
            h = h + self.wpe(positions)
        masks = {window: visible(x, positions, window, before) for window in set(self.windows)}
        h = first = self.dropout(normed(h) if self.extras else h)
        for i, block in enumerate(self.blocks):
            values = None
            if self.extras:
                h = self.resid_lambdas[i] * h + self.x0_lambdas[i] * first
                values = self.value_embeds[str(i)](x) if str(i) in self.value_embeds else None
            layer = cache[i] if cache else None
            h = block(h, masks[self.windows[i]], rotation, values, layer)
        out: Tensor = self.ln_f(h)
        return out

    @property
    def unembedding(self) -> Tensor:
        """The weight of the output projection (vocab, width); if tied, the embedding's."""
        return self.wte.weight if self.head is None else self.head.weight

    def logits(self, h: Tensor) -> Tensor:
        """The logits of the output of `hidden`: (..., width) -> (..., vocab)."""
        return capped(F.linear(h, self.unembedding), self.softcap)

    def nats(self, x: Tensor, y: Tensor, positions: Tensor | None = None) -> Tensor:
        """The loss of each target in nats, fp32 (rows, T), 0 for IGNORE; no gradients."""
        h = self.hidden(x, positions).flatten(0, 1)
        return nats_of_each(h, self.unembedding, y.flatten(), self.softcap).view(y.shape)

    def n_params(self) -> int:
        """The number of parameters; a tied head counts once."""
        return sum(p.numel() for p in self.parameters())

    def stacked(self, name: str) -> tuple[int, ...]:
        """The number of rows of each matrix in the parameter `name`; most are a single matrix.

        Queries, keys and values are one parameter, for one product; so are SwiGLU's two matrices.
        """
        for suffix in (".qkv.weight", ".fc.weight"):
            if name.endswith(suffix):
                module: Any = self.get_submodule(name.removesuffix(suffix))
                return tuple(module.rows)
        return (len(self.get_parameter(name)),)


def check_size(c: Config, vocab_size: int, device: torch.device) -> None:
    """Raise ConfigError if weights, gradients and moments need more than the whole memory.

    Also if one mask of attention does: torch's kernels expand it to a number per score.
    """
    parameters = shape.n_params(c, vocab_size)
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(device).total_memory
    if 16 * parameters > memory_bytes:  # four numbers in fp32
        raise ConfigError(
            f"a model of n_layer {c.n_layer}, n_embd {c.n_embd} and seq_len {c.seq_len} has "
            f"{parameters:.2g} parameters and needs {16 * parameters / 2**30:.1f} GiB, but "
            f"there are {memory_bytes / 2**30:.1f}: lower {'--depth' if c.depth else 'one of them'}"
        )
    if (mask_bytes := 4 * shape.masked_pairs(c)) > memory_bytes:
        raise ConfigError(
            f"seq_len {c.seq_len} with windows {c.windows[:20]} and mask {c.mask} needs a mask of "
            f"{mask_bytes / 2**30:.1f} GiB, but there are {memory_bytes / 2**30:.1f}: use a "
            "smaller seq_len or micro_batch, or --windows L --mask none"
        )


def shapes(c: Config, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's parameters, by name, without allocating them."""
    with torch.device("meta"):
        return {name: tuple(p.shape) for name, p in GPT(c, vocab_size).named_parameters()}


def build(c: Config, vocab_size: int, device: torch.device) -> GPT:
    """Build the model with weights from `seed`, the same on every rank and device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(c.seed)
        return GPT(c, vocab_size).to(device)


# -- initial weights, drawn in the order of the model's modules ------------------------------------


def _as_gpt2(model: nn.Module, c: Config) -> None:
    """N(0, 0.02), residual projections scaled by 1/sqrt(2 n_layer): Radford et al. 2019, 2.3."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    for name, parameter in model.named_parameters():
        if name.endswith("proj.weight"):
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * c.n_layer))


@torch.no_grad()
def _as_autoresearch(model: nn.Module, c: Config) -> None:
    """Initial weights of github.com/karpathy/autoresearch: each block is the identity at first.

    Uniform with a standard deviation of 1/sqrt(width); residual projections and gates are 0, and
    the output is almost 0, so that the first loss is that of a uniform guess.
    """
    bound = math.sqrt(3 / c.n_embd)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "proj.weight", "gate.weight")):
            nn.init.zeros_(parameter)
        elif name in ("resid_lambdas", "x0_lambdas"):
            nn.init.constant_(parameter, 1.0 if name == "resid_lambdas" else 0.1)
        elif name in ("wte.weight", "head.weight"):
            nn.init.normal_(parameter, std=1.0 if name == "wte.weight" else 0.001)
        elif parameter.dim() == 2:
            nn.init.uniform_(parameter, -bound, bound)
