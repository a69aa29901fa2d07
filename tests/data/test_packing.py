"""Packing: no token is lost or doubled, and rows are full."""

import random

import numpy as np
import pytest

from gptddp.data.packing import (
    IDS,
    Packed,
    best_fit,
    documents_of,
    hashes,
    origins,
    pack,
    row_hashes,
    split,
)

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
    """The number of real tokens of each row: every piece ends with a target."""
    return packed.valid.shape[1] + 1 - np.argmax(packed.valid[:, ::-1], axis=1)


def fill(packed: Packed) -> float:
    """The fraction of places with real tokens."""
    return float(lengths_of(packed).sum() / packed.tokens.size)


@pytest.mark.parametrize("seq_len", [4, 32])
def test_bos_is_around_documents_only(seq_len):
    """A document with tokens starts behind a BOS and is closed by one, which may open the next. No
    BOS is between pieces of a split document, and only BOS is behind the last target."""
    lengths = [0, 1, 5, 31, 32, 33, 100, 0, 7]
    packed = pack(documents_with_ids(lengths), BOS, seq_len, np.dtype(np.uint32))
    real = np.arange(seq_len + 1) < lengths_of(packed)[:, None]
    bos = packed.tokens == BOS
    assert (bos[:, 1:] & packed.valid).sum() == sum(n > 0 for n in lengths)
    opened = bos[:, :-1] & ~bos[:, 1:] & packed.valid
    assert opened.sum() == sum(n > 0 for n in lengths)
    inside = (bos & real)[:, 1:-1] & ~(packed.valid[:, :-1] | opened[:, 1:])
    assert not inside.any() and bos[~real].all()


def test_pieces_overlap_by_one_and_have_a_target():
    """Pieces cover their document, overlap by one token, and have at least two tokens."""
    for length in range(2, 40):
        document, offset, size = split(np.array([length, 3]), 6)
        mine = document == 0
        assert size.min() >= 2 and size.max() <= 7
        assert offset[mine].tolist() == [6 * i for i in range(mine.sum())]
        assert (offset + size)[mine][-1] == length
        assert size[mine].sum() == length + mine.sum() - 1


@pytest.mark.parametrize("width", [2, 3, 17, 257])
def test_pieces_of_a_row_do_not_overlap(width):
    """Each place of a row has at most one piece; a place is free before a piece that needs one."""
    rng = random.Random(1)
    size = np.array([rng.randint(2, width) for _ in range(500)])
    behind = np.array([rng.random() < 0.5 for _ in range(500)])
    row, column, n_rows = best_fit(size, width, behind)
    used = np.zeros((n_rows, width), int)
    for r, c, n in zip(row, column, size, strict=True):
        used[r, c : c + n] += 1
    assert used.max() == 1 and (used[:, 0] == 1).all()
    for r, c in zip(row[behind & (column > 0)], column[behind & (column > 0)], strict=True):
        assert used[r, c - 1] == 0


@pytest.mark.parametrize("how", IDS)
@pytest.mark.parametrize("seq_len", [1024, 2048])
def test_rows_are_full_and_no_token_is_discarded(seq_len, how):
    """With 1024 documents 99.5 % of the places are used, and every token is a target once."""
    for seed in range(3):
        lengths, bos = log_normal(1024, 1042, seed), 2**31
        packed = pack(documents_with_ids(lengths), bos, seq_len, np.dtype("u4"), how)
        assert fill(packed) >= 0.995
        targets = packed.tokens[:, 1:][packed.valid & (packed.tokens[:, 1:] != bos)]
        assert np.array_equal(np.sort(targets), np.arange(sum(lengths)))


@pytest.mark.parametrize(
    ("seq_len", "low", "high"),
    [(128, 20, 60), (256, 129, 160), (256, 129, 256), (256, 60, 70), (256, 300, 310), (256, 1, 2)],
)
@pytest.mark.parametrize("n", [40, 300, 1024])
def test_rows_are_full_if_lengths_do_not_fit_together(seq_len, low, high, n):
    """A document per row would use only 51 %, so documents are cut: at most one row, or 0.5 %, is
    empty, and no token is lost."""
    rng = random.Random(n)
    documents, goes_on = documents_with_ids(rng.randint(low, high) for _ in range(n)), [False] * n
    goes_on[n // 2] = True
    packed = pack(documents, 2**31, seq_len, np.dtype("u4"), "best-fit", goes_on)
    empty = packed.valid.size - packed.valid.sum()
    assert empty <= max(seq_len, packed.valid.size * 0.005)
    targets = np.sort(packed.tokens[:, 1:][packed.valid])
    assert np.array_equal(targets[: 1 - n], np.arange(sum(map(len, documents))))
    assert (targets[1 - n :] == 2**31).all()


def test_only_as_many_documents_are_cut_as_needed():
    """Documents of the emptiest rows are cut, until 99.5 % of the places are used."""
    lengths = [100] * 400 + [51] * 30  # rows of 101 targets: two of 52 do not fit into one
    packed = pack(documents_with_ids(lengths), BOS, 101, np.dtype(np.uint32))
    assert packed.valid.sum() == sum(lengths) + len(lengths) and packed.valid.mean() >= 0.995
    used = packed.valid.sum(axis=1)
    assert (used == 52).sum() == 3 and len(packed) == 430 - 13
    assert (used == 101).sum() == 400 + 27 * 52 // 101
    packed = pack(documents_with_ids([51] * 3 + [100] * 5), BOS, 101, np.dtype(np.uint32))
    whole = (packed.tokens[:, 0] == BOS) & (packed.tokens[:, -1] == BOS)
    assert len(packed) == 7 and whole.sum() >= 5  # also where more than one row in 200 is empty


def test_concatenated_documents_are_cut_every_t_tokens():
    """Rows are the text of the block in its order, and overlap by one token."""
    documents = documents_with_ids([5, 0, 3, 9])
    packed = pack(documents, BOS, 4, np.dtype(np.uint32), "concat")
    text = np.concatenate([np.append(np.uint32(BOS), d) for d in documents if len(d)])
    text = np.append(text, np.uint32(BOS))
    for i, row in enumerate(packed.tokens):
        expected = text[4 * i : 4 * i + 5]
        assert (
            np.array_equal(row[: len(expected)], expected) and (row[len(expected) :] == BOS).all()
        )
        assert packed.valid[i].tolist() == [j + 1 < len(expected) for j in range(4)]
    assert len(packed) == -(-(len(text) - 1) // 4)


@pytest.mark.parametrize("how", IDS)
@pytest.mark.parametrize("seq_len", [1, 2, 5, 40])
def test_segments_and_positions_follow_the_documents(how, seq_len):
    """Tokens of a segment follow each other in one document; the padding has segment -1."""
    for seed in range(5):
        lengths = log_normal(60, seq_len, seed)
        documents = documents_with_ids(lengths)
        owner = np.repeat(np.arange(60), lengths)
        packed = pack(documents, 2**31, seq_len, np.dtype(np.uint32), how)
        segments, positions = documents_of(packed.tokens, packed.valid, 2**31)
        assert segments.dtype == positions.dtype == np.int32
        assert segments.shape == positions.shape == (len(packed), seq_len)
        parts = (packed.tokens, packed.valid, lengths_of(packed), segments, positions)
        for row, valid, used, segment, position in zip(*parts, strict=True):
            assert ((segment == -1) == (np.arange(seq_len) >= used)).all()
            last, count, number = None, 0, -1
            for i in range(min(used, seq_len)):
                token, before = int(row[i]), last
                same = (
                    i > 0
                    and token < 2**31
                    and valid[i - 1]
                    and (before == 2**31 or (token == before + 1 and owner[token] == owner[before]))
                )
                # two pieces of one document may meet: the second repeats the last token
                number, count = (number, count + 1) if same else (number + 1, 0)
                assert (segment[i], position[i]) == (number, count)
                last = token


def test_no_text_gives_no_rows():
    """No documents, or only empty ones, give zero rows with the right width and dtype."""
    for documents in ([], documents_with_ids([0, 0])):
        packed = pack(documents, BOS, 8, np.dtype(np.uint16))
        assert packed.tokens.shape == (0, 9) and packed.valid.shape == (0, 8)
        assert packed.tokens.dtype == np.uint16
        assert hashes(packed, origins(0, 0, 0, 0)).shape == (0,)


def test_hashes_depend_on_place_and_tokens_but_not_on_the_dtype():
    """A row's hash depends on its place and tokens, and is the same for uint16 and uint32."""
    documents = documents_with_ids(log_normal(50, 40))
    narrow, wide = (pack(documents, BOS, 64, np.dtype(d)) for d in ("u2", "u4"))
    n = len(wide)

    def of(rows, *place):
        return hashes(rows, origins(n, *place))

    own = of(wide, 3, 1, 2)
    assert np.array_equal(own, of(narrow, 3, 1, 2))
    others = [of(wide, *place) for place in [(4, 1, 2), (3, 2, 2), (3, 1, 3)]]
    assert len(set(np.concatenate([own, *others]).tolist())) == 4 * n
    wide.tokens[0, 5] += 1
    assert (of(wide, 3, 1, 2) != own).tolist() == [True] + [False] * (n - 1)


def test_hashes_depend_on_which_targets_are_valid():
    """If two targets swap their validity, the hash changes, although as many are valid."""
    packed = pack(documents_with_ids(log_normal(50, 40)), BOS, 64, np.dtype("u4"))
    origin = origins(len(packed), 3, 1, 2)
    before = hashes(packed, origin)
    packed.valid[0, 5], packed.valid[0, 6] = False, True
    moved = hashes(packed, origin)
    packed.valid[0, 5], packed.valid[0, 6] = True, False
    assert len({int(it[0]) for it in (before, moved, hashes(packed, origin))}) == 3
    assert np.array_equal(before[1:], moved[1:])


def test_inputs_of_the_model_have_the_hash_of_the_packed_rows():
    """Int64 inputs and targets, with -100 for no target, give the hash of their packed rows."""
    packed = pack(documents_with_ids(log_normal(50, 40)), BOS, 64, np.dtype("u4"))
    origin = origins(len(packed), 3, 1, 2)
    x = packed.tokens[:, :-1].astype(np.int64)
    y = np.where(packed.valid, packed.tokens[:, 1:].astype(np.int64), -100)
    assert np.array_equal(row_hashes(origin, x, y), hashes(packed, origin))
