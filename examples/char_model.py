"""A small GPT over characters, and its text."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

PAGES = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))


class Text:
    """Files as one string of known characters; equal on all ranks with the same files."""

    def __init__(self, paths: Sequence[Path]) -> None:
        try:
            text = "\n".join(path.read_text("utf-8") for path in paths)
        except (OSError, UnicodeDecodeError) as error:
            raise SystemExit(f"--text cannot be read: {error}") from error
        if len(text) < 1000:
            raise SystemExit(f"--text has {len(text)} characters: give 1,000 or more")
        self.characters = sorted(set(text))
        self.sha256 = hashlib.sha256(text.encode()).hexdigest()[:16]
        self.ids = torch.tensor(self.encode(text))

    def encode(self, text: str) -> list[int]:
        number = {character: n for n, character in enumerate(self.characters)}
        if unknown := sorted(set(text) - set(self.characters)):
            raise SystemExit(f"the training text has no {unknown[0]!r}: remove it from --sample")
        return [number[character] for character in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.characters[n] for n in ids)


class Windows(Dataset):
    """Pieces of `length` ids that do not overlap, each with the next ids as targets; int64."""

    def __init__(self, ids: torch.Tensor, length: int) -> None:
        self.ids, self.length = ids, length

    def __len__(self) -> int:
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        piece = self.ids[n * self.length : (n + 1) * self.length + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    """Attention to earlier characters, and an MLP for each character."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            *(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, length, width) -> the same shape."""
        rows, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(rows, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.before_mlp(x))


class CharGPT(nn.Module):
    """ids (rows, length) -> logits (rows, length, characters)."""

    def __init__(
        self, characters: int, length: int, width: int = 96, layers: int = 3, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.length = length
        self.token, self.place = nn.Embedding(characters, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, 4, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, characters)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        return self.head(self.norm(self.blocks(self.token(ids) + self.place(places))))

    @torch.no_grad()
    def sample(self, ids: list[int], count: int, seed: int) -> list[int]:
        """`ids` and `count` more, drawn with a separate generator."""
        self.eval()
        device = self.head.weight.device
        random, found = torch.Generator().manual_seed(seed), list(ids)
        for _ in range(count):
            logits = self(torch.tensor([found[-self.length :]], device=device))[0, -1]
            odds = functional.softmax(logits.float().cpu() / 0.8, dim=0)
            found.append(int(torch.multinomial(odds, 1, generator=random)))
        self.train()
        return found
