"""Keys and values of the tokens that a model has seen, so that the next costs one token's work.

Pope et al. 2022, "Efficiently Scaling Transformer Inference", section 2.1.
"""

import torch
from torch import Tensor


class LayerCache:
    """Keys and values of one layer, in a buffer for `capacity` tokens that is made at first use."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self._both: Tensor | None = None  # (2, rows, heads, capacity, head width)

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of the next t tokens (rows, heads, t, head width); returns all so far.

        Several tokens at once only at the beginning: torch's causal mask is of a square.
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
