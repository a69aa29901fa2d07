"""Packing: nothing lost, nothing twice, rows full."""

import random
from collections import Counter

import numpy as np
import pytest

from gptddp.data.packing import IDS, Packed, best_fit, documents_of, pack, row_hashes, split

BOS = 60_000


def documents_with_ids(lengths, start: int = 0) -> list[np.ndarray]:
    """Documents whose tokens are all different, so that each can be followed."""
    documents = []
    for n in lengths:
        documents.append(np.arange(start, start + n, dtype=np.uint32))
        start += n
    return documents


def log_normal(n: int, mean: float, seed: int = 1) -> list[int]:
    """Lengths with the given mean and the spread of web documents (median 0.6 of the mean)."""
    rng = random.Random(seed)
    return [max(1, round(mean * 0.612 * rng.lognormvariate(0, 0.99))) for _ in range(n)]


def lengths_of(packed: Packed) -> np.ndarray:
    """The real tokens of each row: up to the last target, for every piece ends with one."""
    return packed.valid.shape[1] + 1 - np.argmax(packed.valid[:, ::-1], axis=1)


def fill(packed: Packed) -> float:
    """Real tokens as a part of all places."""
    return float(lengths_of(packed).sum() / packed.tokens.size)


@pytest.mark.parametrize("how", IDS)
@pytest.mark.parametrize("seq_len", [1, 2, 3, 7, 16, 64])
@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_a_target_exactly_once(how, seq_len, seed):
    """Each token of each document is predicted once, from the token before it in the document."""
    rng = random.Random(seed)
    documents = documents_with_ids(
        rng.choice([0, 1, 2, seq_len, seq_len + 1, rng.randint(1, 200)]) for _ in range(60)
    )
    packed = pack(documents, 2**31, seq_len, np.dtype(np.uint32), how)
    inputs, targets = packed.tokens[:, :-1], packed.tokens[:, 1:]
    pairs = Counter(zip(inputs[packed.valid].tolist(), targets[packed.valid].tolist(), strict=True))
    expected: Counter = Counter()
    for document in documents:
        text = [2**31, *document.tolist()]
        expected.update(zip(text, text[1:], strict=False))
    ends = Counter({pair: n for pair, n in pairs.items() if pair[1] == 2**31})
    assert pairs - ends == expected
    # What is left predicts the BOS of the next document from the last token of a document.
    last = Counter(int(document[-1]) for document in documents if len(document))
    assert Counter(before for before, _ in ends.elements()) <= last


@pytest.mark.parametrize("seq_len", [4, 32])
def test_bos_is_before_documents_only(seq_len):
    """One BOS for each document with tokens, none where a split document goes on."""
    lengths = [0, 1, 5, 31, 32, 33, 100, 0, 7]
    packed = pack(documents_with_ids(lengths), BOS, seq_len, np.dtype(np.uint32))
    real = np.arange(seq_len + 1) < lengths_of(packed)[:, None]
    assert ((packed.tokens == BOS) & real).sum() == sum(n > 0 for n in lengths)
    assert (packed.tokens[~real] == BOS).all()


def test_documents_in_a_row_can_be_told_apart():
    """BOS and targets that are not valid mark every start of a document in a row."""
    packed = pack(documents_with_ids([7, 9, 6, 3]), BOS, 4, np.dtype(np.uint32))
    for tokens, valid, length in zip(packed.tokens, packed.valid, lengths_of(packed), strict=True):
        for i in range(1, length):
            follows = tokens[i] == tokens[i - 1] + 1 or tokens[i - 1] == BOS
            assert follows != (tokens[i] == BOS or not valid[i - 1])


def test_pieces_overlap_by_one_and_have_a_target():
    """Pieces cover their document, share one token, and none is shorter than two tokens."""
    for length in range(2, 40):
        document, offset, size = split(np.array([length, 3]), 6)
        mine = document == 0
        assert size.min() >= 2 and size.max() <= 7
        assert offset[mine].tolist() == [6 * i for i in range(mine.sum())]
        assert (offset + size)[mine][-1] == length
        assert size[mine].sum() == length + mine.sum() - 1


@pytest.mark.parametrize("width", [2, 3, 17, 257])
def test_pieces_of_a_row_do_not_overlap(width):
    """Best fit gives each place of a row to one piece at most."""
    size = np.array([random.Random(1).randint(2, width) for _ in range(500)])
    row, column, n_rows = best_fit(size, width)
    used = np.zeros((n_rows, width), int)
    for r, c, n in zip(row, column, size, strict=True):
        used[r, c : c + n] += 1
    assert used.max() == 1 and (used[:, 0] == 1).all()


@pytest.mark.parametrize("how", IDS)
@pytest.mark.parametrize("seq_len", [1024, 2048])
def test_rows_are_full_and_no_token_is_discarded(seq_len, how):
    """Blocks of 1024 documents: 99.5 % of the places are used, every token is a target once."""
    for seed in range(3):
        lengths, bos = log_normal(1024, 1042, seed), 2**31
        packed = pack(documents_with_ids(lengths), bos, seq_len, np.dtype("u4"), how)
        assert fill(packed) >= 0.995
        targets = packed.tokens[:, 1:][packed.valid & (packed.tokens[:, 1:] != bos)]
        assert np.array_equal(np.sort(targets), np.arange(sum(lengths)))


def test_concatenated_documents_are_cut_every_t_tokens():
    """Rows are the text of the block in its order, and overlap by one token."""
    documents = documents_with_ids([5, 0, 3, 9])
    packed = pack(documents, BOS, 4, np.dtype(np.uint32), "concat")
    text = np.concatenate([np.append(np.uint32(BOS), d) for d in documents if len(d)])
    for i, row in enumerate(packed.tokens):
        expected = text[4 * i : 4 * i + 5]
        assert (
            np.array_equal(row[: len(expected)], expected) and (row[len(expected) :] == BOS).all()
        )
        assert packed.valid[i].tolist() == [j + 1 < len(expected) for j in range(4)]
    assert len(packed) == -(-(len(text) - 1) // 4)


@pytest.mark.parametrize("how", IDS)
@pytest.mark.parametrize("seq_len", [1, 2, 5, 40])
def test_segments_and_positions_are_those_of_the_documents(how, seq_len):
    """Tokens of a segment follow each other in one document; -1 is what no target stands behind."""
    for seed in range(5):
        lengths = log_normal(60, seq_len, seed)
        documents = documents_with_ids(lengths)
        owner = np.repeat(np.arange(60), lengths)
        packed = pack(documents, 2**31, seq_len, np.dtype(np.uint32), how)
        segments, positions = documents_of(packed.tokens, packed.valid, 2**31)
        assert segments.dtype == positions.dtype == np.int32
        assert segments.shape == positions.shape == (len(packed), seq_len)
        for row, used, segment, position in zip(
            packed.tokens, lengths_of(packed), segments, positions, strict=True
        ):
            assert ((segment == -1) == (np.arange(seq_len) >= used)).all()
            last, count, number = None, 0, -1
            for i in range(min(used, seq_len)):
                token, before = int(row[i]), last
                same = (
                    i > 0
                    and token < 2**31
                    and (before == 2**31 or (token == before + 1 and owner[token] == owner[before]))
                )
                # two pieces of one document may meet: the second repeats the last token
                number, count = (number, count + 1) if same else (number + 1, 0)
                assert (segment[i], position[i]) == (number, count)
                last = token


def test_nothing_to_pack():
    """No documents, or only empty ones, give no rows of the right shape."""
    for documents in ([], documents_with_ids([0, 0])):
        packed = pack(documents, BOS, 8, np.dtype(np.uint16))
        assert packed.tokens.shape == (0, 9) and packed.valid.shape == (0, 8)
        assert packed.tokens.dtype == np.uint16
        assert row_hashes(packed, 0, 0, 0).shape == (0,)


def test_hashes_tell_rows_places_and_tokens_apart_but_not_widths():
    """A row's hash depends on its place and tokens, and is the same for uint16 and uint32."""
    documents = documents_with_ids(log_normal(50, 40))
    narrow, wide = (pack(documents, BOS, 64, np.dtype(d)) for d in ("u2", "u4"))
    hashes = row_hashes(wide, 3, 1, 2)
    assert np.array_equal(hashes, row_hashes(narrow, 3, 1, 2))
    others = [row_hashes(wide, *place) for place in [(4, 1, 2), (3, 2, 2), (3, 1, 3)]]
    assert len(set(np.concatenate([hashes, *others]).tolist())) == 4 * len(hashes)
    wide.tokens[0, 5] += 1
    assert (row_hashes(wide, 3, 1, 2) != hashes).tolist() == [True] + [False] * (len(hashes) - 1)
