"""Evaluation: its numbers and its memory."""

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptddp.config import Config, with_preset
from gptddp.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from gptddp.model import gpt, loss
from gptddp.model.evaluate import evaluate
from gptddp.model.micro_batches import autocast, micro_batches

CPU = torch.device("cpu")
WORLD: Any = SimpleNamespace(rank=0, world_size=1, device=CPU, all_reduce=lambda t: t)


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.nbytes = max(self.nbytes, tensor.numel() * tensor.element_size())
        return out


def settings(**fields: Any) -> Config:
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 32, "precision": "fp32"}
    return with_preset(Config(**shape | fields), accelerator=False)


def some_rows(n: int, seq_len: int, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, valid); a tenth of the targets is not valid."""
    random = np.random.default_rng(0)
    tokens = random.integers(vocab_size, size=(n, seq_len + 1))
    return tokens.astype(np.uint16), random.random((n, seq_len)) > 0.1


def with_all_logits(
    net: gpt.GPT, rows: tuple[np.ndarray, np.ndarray], tokenizer: Tokenizer, c: Config
) -> tuple[float, float]:
    """Loss and bits per byte by their definitions, from the logits of whole micro-batches."""
    nats_all = nats_text = 0.0
    targets = n_bytes = 0
    token_bytes = torch.from_numpy(tokenizer.token_bytes)
    with torch.no_grad():
        for x, y, positions in micro_batches(*rows, tokenizer.bos, c, CPU):
            with autocast(c, CPU):
                logits = net(x, positions=positions).flatten(0, 1).float()
            y = y.flatten()
            nats = F.cross_entropy(logits, y, reduction="none").double()
            size = torch.where(y >= 0, token_bytes[y.clamp(min=0)], 0)
            nats_all, targets = nats_all + nats.sum().item(), targets + int((y >= 0).sum())
            nats_text, n_bytes = nats_text + nats[size > 0].sum().item(), n_bytes + int(size.sum())
    return nats_all / targets, nats_text / math.log(2) / n_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("mask", ["none", "document"])
def test_the_numbers_equal_those_of_all_logits(precision, mask):
    """Loss and bits per byte in chunks have the bits of a computation with all logits at once."""
    c = settings(seq_len=96, micro_batch=7, precision=precision, mask=mask)
    tokenizer = byte_tokenizer()
    net = gpt.build(c, tokenizer.vocab_size, CPU).eval()
    rows = some_rows(18, c.seq_len, tokenizer.vocab_size)
    result = evaluate(net, rows, tokenizer, c, WORLD)
    assert result and (result.loss, result.bpb) == with_all_logits(net, rows, tokenizer, c)


def test_no_micro_batch_is_evaluated_twice(monkeypatch):
    """Three ranks share the rows of one, and their sums give exactly its numbers."""
    tokenizer, c = byte_tokenizer(), settings(seq_len=16, micro_batch=2)
    net, rows = gpt.build(c, tokenizer.vocab_size, CPU), some_rows(13, 16, tokenizer.vocab_size)
    alone = evaluate(net, rows, tokenizer, c, WORLD)
    seen: list[list[bytes]] = []
    nats = net.nats

    def watched(x: Tensor, *rest: Any) -> Tensor:
        seen[-1].append(x.numpy().tobytes())
        return nats(x, *rest)

    monkeypatch.setattr(net, "nats", watched)
    tables: list[Tensor] = []

    def rank(i: int, all_reduce: Any) -> Any:
        seen.append([])
        world = SimpleNamespace(rank=i, world_size=3, device=CPU, all_reduce=all_reduce)
        return evaluate(net, rows, tokenizer, c, world)

    for i in range(3):
        rank(i, lambda t: tables.append(t.clone()) or t if t.dim() == 2 else t)
    mine = list(seen)
    total = torch.stack(tables).sum(0)
    assert rank(0, lambda t: total if t.dim() == 2 else t) == alone
    assert sorted(map(len, mine)) == [2, 2, 3] and len(set(sum(mine, []))) == 7


def test_after_an_evaluation_that_a_lost_peer_ends_the_model_is_in_training_mode():
    """Otherwise the next steps would have no dropout."""
    tokenizer, c = byte_tokenizer(), settings(seq_len=16, micro_batch=2)
    net, rows = gpt.build(c, tokenizer.vocab_size, CPU), some_rows(3, 16, tokenizer.vocab_size)

    def lost(_: Tensor) -> Tensor:
        raise RuntimeError("Connection closed by peer")

    world: Any = SimpleNamespace(rank=0, world_size=2, device=CPU, all_reduce=lost)
    with pytest.raises(RuntimeError, match="Connection closed"):
        evaluate(net, rows, tokenizer, c, world)
    assert net.training


def test_no_tensor_has_the_logits_of_a_micro_batch():
    """No tensor is larger than the logits of one chunk."""
    c = settings(seq_len=1024, micro_batch=4)
    vocab_size = 10_000
    tokenizer: Any = SimpleNamespace(
        token_bytes=np.ones(vocab_size, np.int32), bos=0, changes=None, vocab_size=vocab_size
    )
    net = gpt.build(c, vocab_size, CPU)
    with Largest() as largest:
        evaluate(net, some_rows(4, c.seq_len, vocab_size), tokenizer, c, WORLD)
    chunk_bytes = 4 * loss._CHUNK * len(net.wte.weight)
    assert largest.nbytes <= chunk_bytes < c.micro_batch * c.seq_len * vocab_size


# -- bits per byte -------------------------------------------------------------------------------


def bpe(tmp_path, change=lambda definition: None) -> Tokenizer:
    """A trained byte-level BPE whose definition has been changed."""
    definition = json.loads(train_bpe(["once upon a time there was a tokenizer " * 9], 300))
    change(definition)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(definition))
    return load_tokenizer(path)


def with_normalizer(*kinds: str):
    steps = [{"type": kind} for kind in kinds]
    return lambda definition: definition.update(
        normalizer={"type": "Sequence", "normalizers": steps}
    )


def with_prefix_space(definition):
    definition["pre_tokenizer"]["pretokenizers"][-1]["add_prefix_space"] = True


def test_bits_per_byte_count_the_bytes_of_the_text_or_are_not_computed(tmp_path):
    """If tokens do not have the bytes of their text, there is no number, and a warning says why."""
    text = "ﬁne １２３ e\u0301 a b"
    tokenizer = bpe(tmp_path)
    assert tokenizer.changes is None and tokenizer.warnings() == []
    assert tokenizer.token_bytes[tokenizer.encoder()(text)].sum() == len(text.encode())
    c = settings(seq_len=8, micro_batch=2)
    for change, word in (
        (with_normalizer("NFKC"), "NFKC"),
        (with_normalizer("NFC", "Lowercase"), "NFC, Lowercase"),
        (with_prefix_space, "adds to a text"),
    ):
        tokenizer = bpe(tmp_path, change)
        assert word in str(tokenizer.changes)
        (warning,) = tokenizer.warnings()
        assert "val_bpb is not computed" in warning and word in warning
        net = gpt.build(c, tokenizer.vocab_size, CPU)
        result = evaluate(net, some_rows(2, 8, tokenizer.vocab_size), tokenizer, c, WORLD)
        assert result and result.bpb is None and result.loss > 0
