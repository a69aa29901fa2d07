"""The block at a run's end that scripts read: the keys of karpathy/autoresearch, one a line."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gptddp.config import Config
from gptddp.model.shape import window
from gptddp.run.progress import Progress


def lines(
    c: Config,
    line: Mapping[str, Any],
    progress: Progress,
    *,
    params: int,
    total_s: float,
    peak_vram_bytes: int,
    mfu: float | None,
) -> list[str]:
    """`key: value` for each; `line`: of the log, of the last step. `n/a` where nobody can know."""
    bpb = line.get("val_bpb")
    found = {
        "val_bpb": "n/a" if bpb is None else f"{bpb:.6f}",
        "training_seconds": f"{progress.train_s:.1f}",
        "total_seconds": f"{total_s:.1f}",
        "peak_vram_mb": f"{peak_vram_bytes / 2**20:.1f}",
        "mfu_percent": "n/a" if mfu is None else f"{100 * mfu:.2f}",
        "total_tokens_M": f"{progress.tokens / 1e6:.1f}",
        "num_steps": f"{progress.step}",
        "num_params_M": f"{params / 1e6:.1f}",
        "depth": f"{c.n_layer}",
    }
    return ["---", *(f"{key + ':':17} {value}" for key, value in found.items())]


def flops_per_token(c: Config, tensors: Mapping[str, Tensor]) -> int:
    """Of forward and backward, by the shapes of the model's tensors; recomputation is not counted.

    6 for each parameter of a product (Chowdhery et al. 2022, "PaLM", appendix B): the matrices of
    the blocks and the head, which may be the embeddings. 12 * width * tokens for the attention of a
    layer, as if each token saw its whole row, or window.
    """
    head = "model.head.weight" if "model.head.weight" in tensors else "model.wte.weight"
    used = sum(
        tensor.numel()
        for name, tensor in tensors.items()
        if name == head or (name.startswith("model.blocks.") and tensor.dim() == 2)
    )
    seen = sum(window(c, layer) or c.seq_len for layer in range(c.n_layer))
    return 6 * used + 12 * c.n_embd * seen


def mfu(flops: float, tokens: int, seconds: float, ranks: int, peak: float | None) -> float | None:
    """The part of what all ranks could compute that the model used: so many FLOP a token.

    `peak`: FLOP/s of one rank; None where it is not known, or nothing was trained.
    """
    return flops * tokens / (seconds * ranks * peak) if peak and seconds > 0 else None
