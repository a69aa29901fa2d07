"""Writes documents to the parquet shards of a dataset."""

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from gptddp.data import pretokenized
from gptddp.data.dataset import COLUMN, GOES_ON, Split
from gptddp.data.tokenizer import Tokenizer
from gptddp.files import fsync

_SHARD_BYTES = 256 << 20  # of text
# Row groups are dealt to lanes: with four per lane, lanes differ by a few percent.
_ROW_GROUPS = 4 * 48
_ROW_GROUP_ROWS = 1024  # at most: a restart tokenises one row group per lane again
_ROW_GROUP_BYTES = 4 << 20  # of text, about 1 M tokens: for the same reason
# A row group's tokens are counted in 256 pieces of 512 bytes, evenly spread: all of a small one,
# 3 % of 4 MiB. The estimate is within about 1 %; from the bytes alone, within about 4 %.
_PIECES, _PIECE_BYTES = 256, 512


def rows_per_group(rows: int) -> int:
    """Rows of a row group, if the training split has `rows` rows (documents or parts)."""
    return max(1, min(_ROW_GROUP_ROWS, rows // _ROW_GROUPS))


class ShardWriter:
    """Writes documents to DIR/SPLIT/00000.parquet and so on; `close` returns the manifest's entry.

    zstd, because it decodes at 1.5 GB/s and halves the reads from the volume; no dictionary,
    because documents do not repeat; page checksums, because nothing else reveals a flipped bit.
    """

    def __init__(
        self,
        dir: Path,
        split: Split,
        rows_per_group: int,
        tokenizer: Tokenizer,
        are_ids: bool = False,
        marks: bool = False,
    ) -> None:
        """`are_ids`: documents are ids of the tokenizer instead of text (data/pretokenized.py).

        `marks`: write a column that marks the documents that another row continues. This and all
        methods raise OSError.
        """
        self._made_by = tokenizer if are_ids else None
        self._encode, self._marks = tokenizer.encoder(), marks
        self._dir, self._split, self._rows_per_group = dir, split, rows_per_group
        self._files: list[dict[str, Any]] = []
        self._writer: pq.ParquetWriter | None = None
        self._group: list[bytes] = []
        self._goes_on: list[bool] = []  # one mark per document of the group
        self._group_bytes = self._documents = 0
        (dir / split).mkdir()

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:  # not closed: an exception ends the block
            with contextlib.suppress(OSError):  # the disk may still be full
                self._writer.close()
                self._sink.close()

    def add(self, document: bytes, goes_on: bool = False) -> None:
        """Write a document, or a part of one, as a row: UTF-8, or the bytes of its ids."""
        size = len(document)
        if self._made_by is not None:  # the size of the text that the ids stand for
            ids = pretokenized.ids_of(document, self._made_by)
            size = int(self._made_by.token_bytes[ids].sum()) or 1
        if self._group and self._group_bytes + size > _ROW_GROUP_BYTES:
            self._write_group()
        self._group.append(document)
        self._goes_on.append(goes_on)
        self._group_bytes += size
        self._documents += not goes_on
        if len(self._group) == self._rows_per_group:
            self._write_group()

    def close(self) -> dict[str, Any]:
        """Finish the last file; returns the manifest's entry of the split."""
        self._write_group()
        self._close_file()
        fsync(self._dir / self._split)
        text_bytes = sum(b for file in self._files for _, b, _ in file["row_groups"])
        return {"documents": self._documents, "text_bytes": text_bytes, "files": self._files}

    def _write_group(self) -> None:
        if not self._group:
            return
        if self._made_by is None:
            texts = pa.array([document.decode() for document in self._group], pa.string())
            table = pa.table({COLUMN: texts})
        else:
            column = pretokenized.to_arrow(self._group, self._made_by)
            table = pa.table({pretokenized.COLUMN: column})
        if self._marks:
            table = table.append_column(GOES_ON, pa.array(self._goes_on, pa.bool_()))
        if self._writer is None:
            self._writer = self._open_file(table.schema)
        self._writer.write_table(table, row_group_size=len(self._group))
        file = self._files[-1]
        file["rows"] += len(self._group)
        file["row_groups"].append([len(self._group), self._group_bytes, self._tokens()])
        self._group, self._goes_on, self._group_bytes = [], [], 0
        if sum(text_bytes for _, text_bytes, _ in file["row_groups"]) >= _SHARD_BYTES:
            self._close_file()

    def _tokens(self) -> int:
        """Estimate the tokens of the group, plus one for the end of each row."""
        whole = b"".join(self._group)
        if self._made_by is not None:
            return len(pretokenized.ids_of(whole, self._made_by)) + len(self._group)
        step = max(_PIECE_BYTES, len(whole) // _PIECES)
        pieces = [whole[at : at + _PIECE_BYTES] for at in range(0, len(whole), step)]
        found = sum(len(self._encode(piece.decode("utf-8", "ignore"))) for piece in pieces)
        return found * len(whole) // sum(map(len, pieces)) + len(self._group)

    def _open_file(self, schema: pa.Schema) -> pq.ParquetWriter:
        path = f"{self._split}/{len(self._files):05}.parquet"
        self._files.append(dict(path=path, bytes=0, xxh3_64="", rows=0, row_groups=[]))
        self._sink = pa.OSFile(os.fsencode(self._dir / path), "wb")
        return pq.ParquetWriter(
            self._sink,
            schema,
            compression="zstd",
            compression_level=3,
            use_dictionary=False,
            write_statistics=False,
            write_page_checksum=True,
        )

    def _close_file(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._sink.close()
        self._writer = None
        path = self._dir / self._files[-1]["path"]
        fsync(path)
        with path.open("rb") as file:
            content = hashlib.file_digest(file, xxhash.xxh3_64)
        self._files[-1] |= {"bytes": path.stat().st_size, "xxh3_64": content.hexdigest()}
