"""Documents to rows of T+1 tokens, with nothing thrown away: pure functions, no I/O.

A document is its tokens between two BOS: the one that opens it is an input, the one that closes it
a target. Longer ones are split into pieces that overlap by one token: it is the last target of one
piece and the first input of the next, so no target is lost. What is put into rows is targets, T in
each; where one document follows another, one BOS closes the first and opens the second.

A document that goes on elsewhere, as the part of a huge one, is not closed: what follows its last
token is in another block. The BOS of the document behind it in the row is no target.

best-fit  pieces are put into rows best-fit decreasing (Ding et al. 2024, "Fewer truncations
          improve language modeling"), with the free space of the open rows as the bits of one
          integer: a document is cut only if it is longer than a row. Where lengths do not fit
          together so (all a bit longer than half a row), the documents of the emptiest rows are
          packed as by concat: as few rows as it takes to leave one place in 200 empty
concat    the documents of a block, one behind the other, are cut every T tokens: all rows but the
          last of a block are full, and about twice as many documents are cut
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

# Each way to pack, with its name in the loader's state that a checkpoint keeps. A name stands for
# all that decides the rows besides the settings: dealing, blocks, splitting, packing, keys. Change
# any of them, and change the name: then no older state is continued with other rows.
IDS = {"best-fit": "bfd-4", "concat": "concat-3"}
_EMPTY = 200  # of so many places one may be empty before best-fit cuts documents


@dataclass(frozen=True)
class Packed:
    """n rows of tokens and which of their T targets count.

    tokens (n, T+1), dtype of the tokenizer, BOS behind the last real token of a row;
    valid (n, T) bool: does tokens[i, t+1] count as a target. False behind the last token of a row,
    at the BOS behind a document that goes on elsewhere, and where a later piece of a split document
    begins behind another document: that token was the last target of the piece before. So the
    documents in a row can be told apart: one begins at every BOS and at every token that is not
    valid (`documents_of`).
    """

    tokens: np.ndarray
    valid: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, which: np.ndarray | slice) -> "Packed":
        """Some of the rows, or all in another order."""
        return Packed(self.tokens[which], self.valid[which])


def pack(
    documents: Sequence[np.ndarray],
    bos: int,
    seq_len: int,
    dtype: npt.DTypeLike,
    how: str = "best-fit",
    goes_on: Sequence[bool] = (),
) -> Packed:
    """Pack documents (1-D arrays of tokens, without BOS) into rows; best-fit: long pieces first.

    Of 200 rows or more, 99.5 % of the places are targets; of fewer, all but those of one row.

    Documents without tokens are left out. `goes_on`: which of them are not closed, because they go
    on elsewhere; empty where none does. The same documents always give the same rows.
    """
    marks = goes_on or [False] * len(documents)
    found = [(tokens, mark) for tokens, mark in zip(documents, marks, strict=True) if len(tokens)]
    flat, starts, lengths = _joined([tokens for tokens, _ in found], bos, dtype)
    is_open = np.array([mark for _, mark in found], dtype=bool)
    closed = ~is_open  # with the BOS of the next document, or the last one of the block
    if how == "concat":  # as if all were one document; each of its pieces is a row
        whole = np.full(len(found[:1]), int(lengths.sum() + closed[-1:].sum()))
        document, offset, size = split(whole, seq_len)
        row, column = np.arange(len(size)), np.zeros(len(size), np.int64)
        no_target = starts[1:][is_open[:-1]] - 1
    else:
        lengths += closed
        document, offset, size = split(lengths, seq_len)
        is_open = is_open[document] & (offset + size == lengths[document])
        row, column, no_target = _placed(size, seq_len, offset > 0, is_open)
    packed = _filled(flat, starts[document] + offset, size, row, column, bos, seq_len)
    packed.valid.reshape(-1)[no_target] = False
    if how == "best-fit":
        stay, cut = _emptiest(packed.valid, row, document)
        if len(cut):
            again, open_ = zip(*(found[i] for i in cut), strict=True)
            kept, more = packed.take(stay), pack(again, bos, seq_len, dtype, "concat", open_)
            both = ((kept.tokens, more.tokens), (kept.valid, more.valid))
            return Packed(*map(np.concatenate, both))
    some = np.asarray(packed.valid.any(axis=1))  # all, unless T is 1
    return packed if some.all() else packed.take(some)


def _emptiest(
    valid: np.ndarray, row: np.ndarray, document: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Of the rows by best fit: which stay, bool, and the documents of the others, to be cut.

    No more are taken apart than it takes to save the rows that are too many. A document that is
    longer than a row is cut anyway: its other pieces, which are rows of their own, go with it.
    """
    empty, seq_len = np.count_nonzero(~valid, axis=1), valid.shape[1]
    total = int(empty.sum())
    save = -(-(_EMPTY * total - valid.size) // ((_EMPTY - 1) * seq_len))
    kept = total - min(save, total // seq_len) * seq_len  # empty places of the rows that stay
    order, stay = np.argsort(empty, kind="stable"), np.zeros(len(valid), bool)
    stay[order[np.cumsum(empty[order]) <= kept]] = True
    cut = np.unique(document[~stay[row]])
    stay[row[np.isin(document, cut)]] = False
    return stay, cut


def _joined(
    documents: Sequence[np.ndarray], bos: int, dtype: npt.DTypeLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A BOS and its tokens for each document, and one more BOS: (tokens, starts, lengths)."""
    lengths = np.array([1 + len(tokens) for tokens in documents], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    flat = np.full(int(lengths.sum()) + 1, bos, dtype)
    for start, tokens in zip(starts.tolist(), documents, strict=True):
        flat[start + 1 : start + 1 + len(tokens)] = tokens
    return flat, starts, lengths


def _filled(
    flat: np.ndarray,
    source: np.ndarray,
    size: np.ndarray,
    row: np.ndarray,
    column: np.ndarray,
    bos: int,
    seq_len: int,
) -> Packed:
    """The rows of pieces, which are `size` tokens of `flat` from `source` on: all targets valid."""
    rows = np.full((int(row.max(initial=-1)) + 1, seq_len + 1), bos, flat.dtype)
    rows_flat, target = rows.reshape(-1), row * (seq_len + 1) + column
    for s, t, n in zip(source.tolist(), target.tolist(), size.tolist(), strict=True):
        rows_flat[t : t + n] = flat[s : s + n]
    used = np.zeros(len(rows), np.int64)
    np.maximum.at(used, row, column + size)
    return Packed(rows, np.arange(1, seq_len + 1) < used[:, None])


def _placed(
    size: np.ndarray, seq_len: int, resumed: np.ndarray, is_open: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(row, column) of each piece by best fit, and which targets are none, counted over all rows.

    resumed (bool): later pieces of a document; is_open (bool): pieces that nothing closes.
    """
    # By targets; a resumed piece begins behind the BOS that closes another.
    # Behind an open piece is a place for the BOS of the next document, unless the row ends.
    row, column, _ = best_fit(np.minimum(size - 1 + is_open, seq_len), seq_len, resumed)
    first = row * seq_len + column - 1  # the target that is the first token of the piece
    resumed = resumed & (column > 0)
    is_open = is_open & (column + size <= seq_len)
    return row, column, np.concatenate([first[resumed], (first + size)[is_open]])


def split(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut documents of these lengths (BOS included, each at least 2) into pieces of up to T+1.

    Three int64 arrays over the pieces, in the order of the text: index of the document, offset of
    the piece in it, size. Every piece has at least one target.
    """
    pieces = -(-(lengths - 1) // seq_len)
    document = np.repeat(np.arange(len(lengths)), pieces)
    first = np.cumsum(pieces) - pieces
    offset = (np.arange(len(document)) - first[document]) * seq_len
    return document, offset, np.minimum(lengths[document] - offset, seq_len + 1)


def best_fit(
    size: np.ndarray, width: int, behind: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """Best-fit decreasing: (row, column) of each piece, int64, and the number of rows.

    behind (bool): pieces that leave one place free where they are not the first of their row.
    """
    row, column = np.zeros(len(size), np.int64), np.zeros(len(size), np.int64)
    order = np.argsort(-size, kind="stable")
    n_rows = int(np.count_nonzero(size == width))  # full rows: the first of the order, no search
    row[order[:n_rows]] = np.arange(n_rows)
    rest = order[n_rows:]
    rows, columns = [], []
    spaces = 0  # bit s is set when some open row has space for exactly s
    open_rows: list[list[int]] = [[] for _ in range(width)]  # by that space
    for n, free in zip(size[rest].tolist(), behind[rest].tolist(), strict=True):
        fitting = spaces >> (n + free)
        if fitting:
            space = n + free + (fitting & -fitting).bit_length() - 1
            r = open_rows[space].pop()
            if not open_rows[space]:
                spaces ^= 1 << space
            space -= free
        else:
            space, r = width, n_rows
            n_rows += 1
        rows.append(r)
        columns.append(width - space)
        if space > n + 1:  # no piece needs less than two
            open_rows[space - n].append(r)
            spaces |= 1 << (space - n)
    row[rest], column[rest] = rows, columns
    return row, column, n_rows


def documents_of(tokens: np.ndarray, valid: np.ndarray, bos: int) -> tuple[np.ndarray, np.ndarray]:
    """Which document the tokens of packed rows belong to, and where they are in it.

    tokens (n, T+1) and valid (n, T) of `Packed` -> segments, positions, both int32 (n, T), one for
    each input tokens[:, :T]. Segments count the documents of a row from 0 and are -1 behind its
    end; positions count the tokens of a segment from 0. A later piece of a split document is a
    document of its own here: what it continues is in another row.
    """
    n, seq_len = valid.shape
    columns = np.arange(seq_len, dtype=np.int32)
    last = seq_len - 1 - np.argmax(valid[:, ::-1], axis=1)[:, None]  # the last target of the row
    begins = tokens[:, :-1] == bos
    begins[:, 1:] |= ~valid[:, :-1]
    begins[:, :1] = True
    # The last token of the row is at last + 1; the padding behind it is one segment.
    begins &= columns <= last + 2
    segments = np.cumsum(begins, axis=1, dtype=np.int32) - 1
    segments[columns > last + 1] = -1
    starts = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    return segments, (columns - starts).astype(np.int32)


def origins(n: int, lane: int, epoch: int, block: int) -> np.ndarray:
    """Where each row of a block comes from, int64 (n, 4): lane, epoch, block, number in it."""
    found = np.empty((n, 4), np.int64)
    found[:, :3] = lane, epoch, block
    found[:, 3] = np.arange(n)
    return found


def row_hashes(origin: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each row, uint64 (n): xxh3 of where it comes from, inputs and targets.

    origin int64 (n, 4); x and y (n, T), y negative where there is no target. They are hashed as
    little-endian int32, whatever dtype they are kept in.
    """
    n, width = x.shape
    records = np.empty((n, 8 + 2 * width), "<i4")
    records[:, :8].view("<i8")[:] = origin
    records[:, 8 : 8 + width] = x
    np.maximum(y, -1, out=records[:, 8 + width :], casting="unsafe")
    return np.array([xxhash.xxh3_64_intdigest(record) for record in records], np.uint64)


def hashes(packed: Packed, origin: np.ndarray) -> np.ndarray:
    """The hash of each row, uint64 (n), before it is on its way to the model."""
    y = np.where(packed.valid, packed.tokens[:, 1:].astype(np.int32), -1)
    return row_hashes(origin, packed.tokens[:, :-1], y)
