"""Packs documents into rows of T+1 tokens without dropping a token: pure functions, no I/O.

A document is its tokens between two BOS: the opening BOS is an input, the closing BOS a target.
Longer documents are split into pieces that overlap by one token: it is the last target of one piece
and the first input of the next, so no target is lost. A row has T places for targets. Between two
documents of a row is one BOS, which closes the first and opens the second.

A document that continues elsewhere, as a part of a huge one, is not closed: its next token is in
another block. The BOS of the document behind it in the row is no target.

best-fit  pieces are put into rows by best-fit decreasing (Ding et al. 2024, "Fewer truncations
          improve language modeling"), with the free space of the open rows as the bits of one
          integer: only documents longer than a row are cut. If lengths do not fit together (all
          slightly longer than half a row), the documents of the emptiest rows are packed by
          concat: as few rows as needed to leave at most one place in 200 empty
concat    the documents of a block are joined and cut every T tokens: all rows of a block except the
          last are full, and about twice as many documents are cut
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

# Each packing, with its name in the loader's state in a checkpoint. A name stands for everything
# that determines the rows besides the settings: dealing, blocks, splitting, packing, keys. If you
# change any of them, change the name: then no older state continues with other rows.
IDS = {"best-fit": "bfd-4", "concat": "concat-3"}
_EMPTY = 200  # one of this many places may be empty before best-fit cuts documents


@dataclass(frozen=True)
class Packed:
    """n rows of tokens, and whether each of their T targets counts.

    tokens (n, T+1), dtype of the tokenizer, padded with BOS;
    valid (n, T) bool: does tokens[i, t+1] count as a target? False in the padding, at the BOS
    behind a document that continues elsewhere, and where a later piece of a split document starts
    behind another document: that token was the last target of the piece before. So the documents in
    a row can be separated: one starts at every BOS and at every token that is not valid
    (`documents_of`).
    """

    tokens: np.ndarray
    valid: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, which: np.ndarray | slice) -> "Packed":
        """Select rows, by index or slice."""
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

    In 200 rows or more, 99.5 % of the places are targets; in fewer, at most one row's places are
    empty. Documents without tokens are skipped. `goes_on`: for each document, does it continue
    elsewhere? Then it is not closed. Empty: none does. The same documents give the same rows.
    """
    marks = goes_on or [False] * len(documents)
    found = [(tokens, mark) for tokens, mark in zip(documents, marks, strict=True) if len(tokens)]
    flat, starts, lengths = _joined([tokens for tokens, _ in found], bos, dtype)
    is_open = np.array([mark for _, mark in found], dtype=bool)
    closed = ~is_open  # by the BOS of the next document, or by the last BOS of the block
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
    """Select best-fit rows to keep (bool); return them and the documents of the others, to be cut.

    It takes apart only as many rows as needed to get rid of the surplus ones. All rows with pieces
    of a document to be cut are taken apart too.
    """
    empty, seq_len = np.count_nonzero(~valid, axis=1), valid.shape[1]
    total = int(empty.sum())
    save = -(-(_EMPTY * total - valid.size) // ((_EMPTY - 1) * seq_len))
    kept = total - min(save, total // seq_len) * seq_len  # empty places in the rows to keep
    order, stay = np.argsort(empty, kind="stable"), np.zeros(len(valid), bool)
    stay[order[np.cumsum(empty[order]) <= kept]] = True
    cut = np.unique(document[~stay[row]])
    stay[row[np.isin(document, cut)]] = False
    return stay, cut


def _joined(
    documents: Sequence[np.ndarray], bos: int, dtype: npt.DTypeLike
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Join all documents, each after a BOS, and one more BOS: (tokens, starts, lengths)."""
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
    """The rows of pieces of `size` tokens of `flat`, starting at `source`: all targets valid."""
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
    """(row, column) of each piece by best fit, and flat indices of the invalid targets.

    resumed (bool): later pieces of a document; is_open (bool): pieces without a closing BOS.
    """
    # Sizes count targets; a resumed piece starts behind the BOS that closes another document.
    # An open piece is followed by a place for the BOS of the next document, unless the row ends.
    row, column, _ = best_fit(np.minimum(size - 1 + is_open, seq_len), seq_len, resumed)
    first = row * seq_len + column - 1  # the target that is the first token of the piece
    resumed = resumed & (column > 0)
    is_open = is_open & (column + size <= seq_len)
    return row, column, np.concatenate([first[resumed], (first + size)[is_open]])


def split(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut documents of these lengths (BOS included, each at least 2) into pieces of up to T+1.

    Three int64 arrays over the pieces, in the order of the text: index of the document, offset in
    the document, size. Every piece has at least one target.
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

    behind (bool): pieces that leave one place free before them unless they are first in their row.
    """
    row, column = np.zeros(len(size), np.int64), np.zeros(len(size), np.int64)
    order = np.argsort(-size, kind="stable")
    n_rows = int(np.count_nonzero(size == width))  # full rows come first and need no search
    row[order[:n_rows]] = np.arange(n_rows)
    rest = order[n_rows:]
    rows, columns = [], []
    spaces = 0  # bit s is set if some open row has space for exactly s
    open_rows: list[list[int]] = [[] for _ in range(width)]  # by their space
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
        if space > n + 1:  # every piece needs at least two
            open_rows[space - n].append(r)
            spaces |= 1 << (space - n)
    row[rest], column[rest] = rows, columns
    return row, column, n_rows


def documents_of(tokens: np.ndarray, valid: np.ndarray, bos: int) -> tuple[np.ndarray, np.ndarray]:
    """The document of each token of packed rows, and the token's position in it.

    tokens (n, T+1) and valid (n, T) of `Packed` -> segments, positions, both int32 (n, T), one for
    each input tokens[:, :T]. Segments count the documents of a row from 0 and are -1 in the
    padding; positions count the tokens of a segment from 0. A later piece of a split document
    counts as a separate document here: the piece before it is in another row.
    """
    n, seq_len = valid.shape
    columns = np.arange(seq_len, dtype=np.int32)
    last = seq_len - 1 - np.argmax(valid[:, ::-1], axis=1)[:, None]  # the last target of the row
    begins = tokens[:, :-1] == bos
    begins[:, 1:] |= ~valid[:, :-1]
    begins[:, :1] = True
    # The row's last token is at last + 1; the padding behind it is one segment.
    begins &= columns <= last + 2
    segments = np.cumsum(begins, axis=1, dtype=np.int32) - 1
    segments[columns > last + 1] = -1
    starts = np.maximum.accumulate(np.where(begins, columns, 0), axis=1)
    return segments, (columns - starts).astype(np.int32)


def origins(n: int, lane: int, epoch: int, block: int) -> np.ndarray:
    """The origin of each row of a block, int64 (n, 4): lane, epoch, block, number in the block."""
    found = np.empty((n, 4), np.int64)
    found[:, :3] = lane, epoch, block
    found[:, 3] = np.arange(n)
    return found


def row_hashes(origin: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A 64-bit hash of each row, uint64 (n): xxh3 of origin, inputs and targets.

    origin int64 (n, 4); x and y (n, T), y negative if there is no target. x and y are hashed as
    little-endian int32, whatever their dtype.
    """
    n, width = x.shape
    records = np.empty((n, 8 + 2 * width), "<i4")
    records[:, :8].view("<i8")[:] = origin
    records[:, 8 : 8 + width] = x
    np.maximum(y, -1, out=records[:, 8 + width :], casting="unsafe")
    return np.array([xxhash.xxh3_64_intdigest(record) for record in records], np.uint64)


def hashes(packed: Packed, origin: np.ndarray) -> np.ndarray:
    """The hash of each packed row, uint64 (n): see `row_hashes`."""
    y = np.where(packed.valid, packed.tokens[:, 1:].astype(np.int32), -1)
    return row_hashes(origin, packed.tokens[:, :-1], y)
