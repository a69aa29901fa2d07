"""A prepared dataset: parquet shards of text, and the manifest `dataset.json`, which lists them.

dataset.json            written last and by rename: a folder without it is no dataset
tokenizer.json          if the tokenizer is a BPE
train/00000.parquet...  column `text`, row groups of at most 1024 documents; or column `tokens`
val/00000.parquet...    documents that are not in train

A huge document is cut into parts, each a separate row. Then there is a second column, `goes_on`:
true if another row continues the document. The rows of a document are in one split, in no order.

bad.jsonl               records that `gptddp prepare --max-bad` has skipped; not read
.prepare/               only while `gptddp prepare` is running, or after it was killed
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gptddp.data import inventory, pretokenized
from gptddp.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer
from gptddp.errors import DataError
from gptddp.files import exists, may_pass, parse_json

FORMAT, VERSION = "gptddp-dataset", 3  # 0.1.0 wrote version 1
MANIFEST = "dataset.json"
SCRATCH = ".prepare"  # the first folder that `prepare` makes and the last that it removes
COLUMN, GOES_ON = "text", "goes_on"
_FOOTERS = 128  # parsed footers to keep, about 1 kB per row group; files are closed after each read
_PREPARE = "`gptddp prepare SOURCE... --out DIR`, on a cluster `gptddp-k8s prepare`"

Split = Literal["train", "val"]
SPLITS: tuple[Split, ...] = ("train", "val")


@dataclass(frozen=True)
class RowGroup:
    """The unit of reading: row group `index` of the file `path`, relative to the dataset."""

    path: str
    index: int
    rows: int
    text_bytes: int
    tokens: int  # estimate, plus one for the end of each row; row groups are dealt to lanes by it


class Dataset:
    """A dataset on disk; made by `open_dataset`. Safe to share between threads."""

    def __init__(self, dir: Path, manifest: dict[str, Any], damage: Sequence[str] = ()) -> None:
        self.dir = dir
        self.manifest = manifest
        self.damage = list(damage)  # messages: training files that are missing or of another size

    @property
    def pretokenized(self) -> bool:
        """Are the documents token ids instead of text?"""
        return bool(self.manifest.get("column", COLUMN) == pretokenized.COLUMN)

    @cached_property
    def sha256(self) -> str:
        """The data's identity: hex, over path, size, content hash and row groups of every file."""
        files = [file for split in self.manifest["splits"].values() for file in split["files"]]
        files.sort(key=lambda file: os.fsencode(file["path"]))
        return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()

    def row_groups(self, split: Split) -> list[RowGroup]:
        """Every row group of a split; its number is its index in this list."""
        files = self.manifest["splits"][split]["files"]
        return [
            RowGroup(file["path"], index, *group)
            for file in sorted(files, key=lambda file: os.fsencode(file["path"]))
            for index, group in enumerate(file["row_groups"])
        ]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the dataset was prepared with; raises DataError if it has changed."""
        return self._tokenizer

    @cached_property  # loading 50,000 tokens takes a noticeable part of a second
    def _tokenizer(self) -> Tokenizer:
        said = self.manifest["tokenizer"]
        if said["kind"] == "bytes":
            return byte_tokenizer()
        tokenizer = load_tokenizer(self.dir / said["file"])
        if tokenizer.sha256 != said["sha256"]:
            raise DataError(
                f"{self.dir / said['file']} is not the tokenizer of this dataset (sha256 "
                f"{tokenizer.sha256[:12]} instead of {said['sha256'][:12]}): put the file back"
            )
        return tokenizer

    def warnings(self) -> list[str]:
        """One line for each damaged training file, if damage does not end the run."""
        return [f"{self.dir}: {text}: its row groups cannot be read" for text in self.damage]

    def check_whole(self) -> None:
        """Raise DataError, with their names, if training files are missing or of another size."""
        if self.damage:
            raise _not_whole(self.dir, self.damage)

    def check_storage(self) -> None:
        """Raise DataError if even the manifest cannot be read: the whole volume is out of reach.

        Raises OSError if the volume may come back, so that the next life tries again.
        """
        try:
            (self.dir / MANIFEST).read_bytes()
        except OSError as error:
            if may_pass(error):
                raise
            raise DataError(
                f"{self.dir} is out of reach ({error.strerror}): bring the storage back, then run "
                "the same command again"
            ) from error

    def read(self, row_group: RowGroup) -> list[str] | list[np.ndarray]:
        """The documents of a row group: str, or 1-D arrays of token ids; null becomes None.

        A document that was cut has a row for each part: see `goes_on`. Pages are checked against
        their checksums. Raises DataError, with the row group's name, if it cannot be read. The
        error does not show whether a retry may help: a flipped bit and an absent volume look alike.
        """
        if self.pretokenized:
            return self._column(row_group, pretokenized.COLUMN, pretokenized.from_arrow)
        return self._column(row_group, COLUMN, pa.ChunkedArray.to_pylist)

    def goes_on(self, row_group: RowGroup) -> list[bool]:
        """For each row of a row group: does another row continue its document? Raises as `read`."""
        if "cut" not in self.manifest:
            return [False] * row_group.rows
        return self._column(row_group, GOES_ON, pa.ChunkedArray.to_pylist)

    def _column(
        self, row_group: RowGroup, name: str, values: Callable[[pa.ChunkedArray], list[Any]]
    ) -> list[Any]:
        path = self.dir / row_group.path
        try:
            stat = path.stat()
            footer = _footer(path, stat.st_ino, stat.st_size, stat.st_mtime_ns)
            with open_parquet(path, footer) as file:  # Arrow's threads would not help
                table = file.read_row_group(row_group.index, columns=[name], use_threads=False)
            found = values(table.column(name))
        except (OSError, ValueError, IndexError, KeyError, pa.ArrowException) as error:
            raise DataError(f"cannot read {path}, row group {row_group.index}: {error}") from error
        if len(found) != row_group.rows:
            raise DataError(
                f"{path}, row group {row_group.index} has {len(found)} rows instead of "
                f"{row_group.rows}: the file has been replaced; put it back or prepare again"
            )
        return found


@contextmanager
def open_parquet(
    path: str | os.PathLike[str], footer: pq.FileMetaData | None = None
) -> Iterator[pq.ParquetFile]:
    """Open a parquet file, also if its name is not UTF-8, which pyarrow alone would refuse.

    Page checksums are compared if the file has them: nothing else reveals damage of an uncompressed
    page. pre_buffer is off, because it would keep all bytes read so far in memory. Raises OSError
    or pyarrow.ArrowException.
    """
    with (
        pa.OSFile(os.fsencode(path)) as raw,
        pq.ParquetFile(
            raw, metadata=footer, pre_buffer=False, page_checksum_verification=True
        ) as file,
    ):
        yield file


@lru_cache(maxsize=_FOOTERS)
def _footer(path: Path, *version: int) -> pq.FileMetaData:
    """The parsed footer of a file; `version` changes when the file is replaced."""
    with open_parquet(path) as file:
        return file.metadata


def is_dataset(path: Path) -> bool:
    """Does the folder hold a dataset, complete or not? Looks at the first bytes of the manifest.

    A file of that name may be huge and of another program. Raises OSError if it cannot be read.
    """
    manifest = path / MANIFEST
    if not exists(manifest, stat.S_ISREG):
        return False
    with open(manifest, "rb") as file:
        begin = file.read(1024)
    return re.match(rb'\s*\{\s*"format"\s*:\s*"%s"' % FORMAT.encode(), begin) is not None


def open_dataset(path: str | os.PathLike[str], on_bad: str = "fail") -> Dataset:
    """Open a prepared dataset; raises DataError, with the fix, unless all its files exist.

    With on_bad "quarantine", training files may be missing or of another size: reading them fails
    later. Raises OSError for an error of the volume that may pass.
    """
    dir = Path(path)
    try:
        manifest = parse_json((dir / MANIFEST).read_bytes())
        known = manifest["format"] == FORMAT
        version = manifest["version"]
    except FileNotFoundError:
        raise DataError(f"{dir}: {_absence(dir)} {_PREPARE}") from None
    except OSError as error:
        if may_pass(error):
            raise
        raise DataError(f"cannot read {dir / MANIFEST}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError):
        known, version = False, None
    if not known:
        raise DataError(f"{dir / MANIFEST} is not a dataset of gptddp: make one with {_PREPARE}")
    if version != VERSION:
        raise DataError(
            f"{dir / MANIFEST} has format version {version}, made by gptddp "
            f"{manifest.get('gptddp')}, but this gptddp reads {VERSION}: prepare the data again "
            f"with {_PREPARE}"
        )
    if wrong := inventory.misplaced(manifest):
        raise DataError(
            f"{dir / MANIFEST}: {wrong}: it must be a path below the dataset's folder, without "
            "'..'; restore the file as it was prepared, or prepare again"
        )
    damaged = inventory.damaged(dir, manifest)
    train = {file["path"] for file in manifest["splits"]["train"]["files"]}
    if not train.issuperset(damaged) or (damaged and on_bad == "fail"):
        raise _not_whole(dir, list(damaged.values()))
    return Dataset(dir, manifest, list(damaged.values()))


def _absence(dir: Path) -> str:
    if os.path.exists(dir / SCRATCH):
        return "its preparation has not finished; wait for it, or run the same command again:"
    if os.path.isdir(dir):
        return "the folder holds no prepared dataset; make one with"
    return "no such folder; make a dataset with"


def _not_whole(dir: Path, lines: list[str]) -> DataError:
    return DataError(
        f"{dir} is not as it was prepared, or not fully copied: {inventory.listed(lines)}: "
        "put the files back as they were, or prepare again"
    )
