"""A prepared dataset: parquet shards of text, and the `dataset.json` that says what is in them.

dataset.json            written last and by rename: a folder without it is no dataset
tokenizer.json          where the tokenizer is a BPE
train/00000.parquet...  column `text`, row groups of at most 1024 documents; or column `tokens`
val/00000.parquet...    documents that are not in train

A huge document is cut into parts, each of them a row of its own. Then there is a second column,
`goes_on`: true where what follows in the document is another row. The rows of a document are of one
split, but in no order.

bad.jsonl               records that `gptddp prepare --max-bad` has left out; not read
.prepare/               only while `gptddp prepare` is at work, or where it was killed
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

FORMAT, VERSION = "gptddp-dataset", 3  # 0.1.0 has made version 1
MANIFEST = "dataset.json"
SCRATCH = ".prepare"  # the first folder that `prepare` makes and the last that it removes
COLUMN, GOES_ON = "text", "goes_on"
_FOOTERS = 128  # parsed and kept, about 1 kB a row group; the files are closed after each read
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
    tokens: int  # about, with one for the end of each row: what lanes are dealt by


class Dataset:
    """A dataset on disk; made by `open_dataset`. Safe to share between threads."""

    def __init__(self, dir: Path, manifest: dict[str, Any], damage: Sequence[str] = ()) -> None:
        self.dir = dir
        self.manifest = manifest
        self.damage = list(damage)  # training files that are missing or of another size, in words

    @property
    def pretokenized(self) -> bool:
        """Are the documents token ids, and not text?"""
        return bool(self.manifest.get("column", COLUMN) == pretokenized.COLUMN)

    @cached_property
    def sha256(self) -> str:
        """The data's identity: hex, over path, size, content hash and row groups of every file."""
        files = [file for split in self.manifest["splits"].values() for file in split["files"]]
        files.sort(key=lambda file: os.fsencode(file["path"]))
        return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()

    def row_groups(self, split: Split) -> list[RowGroup]:
        """Every row group of a split: their numbers are their places in this list."""
        files = self.manifest["splits"][split]["files"]
        return [
            RowGroup(file["path"], index, *group)
            for file in sorted(files, key=lambda file: os.fsencode(file["path"]))
            for index, group in enumerate(file["row_groups"])
        ]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the dataset was prepared with; raises DataError if it has changed."""
        return self._tokenizer

    @cached_property  # reading one of 50,000 tokens takes a part of a second
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
        """One line for each training file whose damage does not end the run."""
        return [f"{self.dir}: {text}: its row groups cannot be read" for text in self.damage]

    def check_whole(self) -> None:
        """Raise DataError, naming them, if training files are missing or of another size."""
        if self.damage:
            raise _not_whole(self.dir, self.damage)

    def check_storage(self) -> None:
        """Raise DataError if not even the manifest can be read: the whole volume is out of reach.

        Raises OSError where the volume may come back, so that the next life tries again.
        """
        try:
            (self.dir / MANIFEST).read_bytes()
        except OSError as error:
            if may_pass(error):
                raise
            raise DataError(
                f"{self.dir} is out of reach ({error.strerror}): bring the storage back, then give "
                "the same command again"
            ) from error

    def read(self, row_group: RowGroup) -> list[str] | list[np.ndarray]:
        """The documents of a row group, null ones as None: str, or 1-D arrays of token ids.

        Where documents are cut, their parts: see `goes_on`. Pages are checked against their
        checksums. Raises DataError, naming the row group, for what cannot be read. The error does
        not say whether trying again may help: a flipped bit and a volume that is away give the same
        one.
        """
        if self.pretokenized:
            return self._column(row_group, pretokenized.COLUMN, pretokenized.from_arrow)
        return self._column(row_group, COLUMN, pa.ChunkedArray.to_pylist)

    def goes_on(self, row_group: RowGroup) -> list[bool]:
        """For each row of a row group: does its document go on in another row? Raises as `read`."""
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
            with open_parquet(path, footer) as file:  # threads of Arrow's own would not help
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
    """Open a parquet file, also one whose name is not UTF-8, which pyarrow alone would refuse.

    Page checksums are compared where the writer left any: nothing else shows damage of an
    uncompressed page. There is no pre_buffer, because it would keep all that was read so far in
    memory. Raises OSError or pyarrow.ArrowException.
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
    """The parsed footer of a file; `version` is what changes when the file is replaced."""
    with open_parquet(path) as file:
        return file.metadata


def is_dataset(path: Path) -> bool:
    """Does the folder hold a dataset, whole or not? By how its manifest begins.

    A file of that name may as well be huge, and another's. Raises OSError where it cannot be read.
    """
    manifest = path / MANIFEST
    if not exists(manifest, stat.S_ISREG):
        return False
    with open(manifest, "rb") as file:
        begin = file.read(1024)
    return re.match(rb'\s*\{\s*"format"\s*:\s*"%s"' % FORMAT.encode(), begin) is not None


def open_dataset(path: str | os.PathLike[str], on_bad: str = "fail") -> Dataset:
    """Open a prepared dataset; raises DataError, with the fix, unless all its files are there.

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
        raise DataError(f"{dir / MANIFEST} is not of a dataset of gptddp: make one with {_PREPARE}")
    if version != VERSION:
        raise DataError(
            f"{dir / MANIFEST} has format version {version}, made by gptddp "
            f"{manifest.get('gptddp')}, and this gptddp reads {VERSION}: prepare the data again "
            f"with {_PREPARE}"
        )
    if wrong := inventory.misplaced(manifest):
        raise DataError(
            f"{dir / MANIFEST}: {wrong}: it must be a path below the dataset's folder, without "
            "'..'; put the file back as it was prepared, or prepare again"
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
        return "there is no prepared dataset in it; make one with"
    return "no such folder; make a dataset with"


def _not_whole(dir: Path, lines: list[str]) -> DataError:
    return DataError(
        f"{dir} is not as it was prepared, or not fully copied: {inventory.listed(lines)}: "
        "put the files back as they were, or prepare again"
    )
