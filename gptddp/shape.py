"""Sizes that follow from the fields of a model's shape; standard library only."""

from gptddp.config import Config

GATE_CHANNELS = 32  # channels from which the gates of value embeddings are computed


def head_size(c: Config) -> int:
    """The width of one head of attention."""
    return c.n_embd // c.n_head


def mlp_width(c: Config) -> int:
    """Four times the width; for SwiGLU, with its third matrix, 8/3, as a multiple of 64.

    So both have about the same number of parameters (Shazeer 2020, "GLU variants", section 3.1).
    """
    return -(-8 * c.n_embd // (3 * 64)) * 64 if c.activation == "swiglu" else 4 * c.n_embd


def padded(vocab_size: int) -> int:
    """Rows of an embedding: a multiple of 64 keeps the largest product on a BLAS's fast path.

    The additional rows are never a target.
    """
    return -(-vocab_size // 64) * 64


def has_value_embedding(c: Config, layer: int) -> bool:
    """Does the layer have a value embedding? Every other layer does, the last one included."""
    return c.extras == "autoresearch" and layer % 2 == (c.n_layer - 1) % 2


def window(c: Config, layer: int) -> int | None:
    """The number of earlier tokens that a token of this layer sees; None: all.

    The pattern is repeated over the layers; the last layer always sees all.
    """
    full = layer == c.n_layer - 1 or c.windows[layer % len(c.windows)] == "L"
    return None if full else c.seq_len // 2


def masked_pairs(c: Config) -> int:
    """Pairs of tokens in the mask of a micro-batch; 0 if every token sees all earlier ones."""
    rows = c.micro_batch if c.mask == "document" else 1
    windows = any(window(c, layer) is not None for layer in range(c.n_layer))
    return rows * c.seq_len**2 if windows or c.mask == "document" else 0


def n_params(c: Config, vocab_size: int) -> int:
    """The number of parameters, without making the model; vectors and gates are not counted."""
    width, kv = c.n_embd, c.kv_heads * head_size(c)
    mlp = mlp_width(c) * width * (3 if c.activation == "swiglu" else 2)
    blocks = c.n_layer * (width * (width + 2 * kv) + width**2 + mlp)
    tables = 1 + (c.head == "untied")  # matrices with a row per token
    values = (c.n_layer + 1) // 2 * kv if c.extras == "autoresearch" else 0
    positions = c.seq_len * width if c.positions == "learned" else 0
    return blocks + padded(vocab_size) * (tables * width + values) + positions
