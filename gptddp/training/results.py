"""The results of a run: the block for scripts at its end, with the keys of autoresearch."""

from collections.abc import Mapping

from torch import Tensor

from gptddp.config import Config
from gptddp.shape import window

_FORMATS = {
    "val_bpb": ".6f",
    "training_seconds": ".1f",
    "total_seconds": ".1f",
    "peak_vram_mb": ".1f",
    "mfu_percent": ".2f",
    "total_tokens_M": ".1f",
    "num_steps": "d",
    "num_params_M": ".1f",
    "depth": "d",
}


def lines(found: Mapping[str, float | None]) -> list[str]:
    """`key: value` for each result, after a line `---`; `n/a` for an unknown value."""
    shown = {
        key: "n/a" if found[key] is None else format(found[key], form)
        for key, form in _FORMATS.items()
        if key in found
    }
    return ["---", *(f"{key + ':':17} {value}" for key, value in shown.items())]


def flops_per_token(c: Config, tensors: Mapping[str, Tensor]) -> int:
    """FLOP of forward and backward for a token, by the tensors' shapes; no recomputation counted.

    6 for each parameter of a matrix product (Chowdhery et al. 2022, "PaLM", appendix B): the
    matrices of the blocks, and the head, which may be the embeddings. 12 * width * tokens for the
    attention of a layer, as if each token saw its whole row or window.
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
    """Model FLOPs utilisation: the used part of the peak FLOP/s of all ranks.

    `flops`: of a token; `peak`: FLOP/s of one rank. None without a known peak or training time.
    """
    return flops * tokens / (seconds * ranks * peak) if peak and seconds > 0 else None
