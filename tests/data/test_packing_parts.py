"""Packing parts of huge documents: a part that continues is not closed, and no token is lost."""

import random
from collections import Counter

import numpy as np
import pytest

from gptddp.data.packing import Packed, documents_of, pack

BOS = 2**31
HOW = ["best-fit", "concat"]


def documents_with_ids(lengths) -> list[np.ndarray]:
    """Documents with consecutive ids, with a gap between the ids of two documents."""
    documents, start = [], 0
    for n in lengths:
        documents.append(np.arange(start, start + n, dtype=np.uint32))
        start += n + 1
    return documents


def packed_parts(how: str, seq_len: int, seed: int) -> tuple[Packed, list[np.ndarray], list[bool]]:
    rng = random.Random(seed)
    lengths = [rng.choice([0, 1, 2, seq_len, seq_len + 1, rng.randint(1, 200)]) for _ in range(60)]
    documents, goes_on = documents_with_ids(lengths), [rng.random() < 0.5 for _ in lengths]
    return pack(documents, BOS, seq_len, np.uint32, how, goes_on), documents, goes_on


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("seq_len", [1, 2, 3, 7, 16, 64])
@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_a_target_once_and_only_last_parts_are_closed(how, seq_len, seed):
    """Every token follows the previous token of its part, once; BOS follows only closed parts."""
    packed, documents, goes_on = packed_parts(how, seq_len, seed)
    inputs, targets = packed.tokens[:, :-1], packed.tokens[:, 1:]
    pairs = Counter(zip(inputs[packed.valid].tolist(), targets[packed.valid].tolist(), strict=True))
    expected: Counter = Counter()
    for document, mark in zip(documents, goes_on, strict=True):
        if len(document):
            text = [BOS, *document.tolist(), *[BOS] * (not mark)]
            expected.update(zip(text, text[1:], strict=False))
    assert pairs == expected
    assert packed.valid.any(axis=1).all()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("seq_len", [1, 2, 5, 40])
@pytest.mark.parametrize("seed", range(3))
def test_a_target_sees_no_other_part_under_the_mask(how, seq_len, seed):
    """From the start of its segment to a target, all tokens are consecutive in one part."""
    packed, _, _ = packed_parts(how, seq_len, seed)
    segments, positions = documents_of(packed.tokens, packed.valid, BOS)
    for row, valid, segment, position in zip(
        packed.tokens.astype(np.int64), packed.valid, segments, positions, strict=True
    ):
        for at in np.flatnonzero(valid):
            run = row[at - position[at] : at + 2]
            assert segment[at] >= 0 and (segment[at - position[at] : at + 1] == segment[at]).all()
            run = run[1:] if run[0] == BOS else run
            run = run[:-1] if len(run) and run[-1] == BOS else run
            assert (np.diff(run) == 1).all()
