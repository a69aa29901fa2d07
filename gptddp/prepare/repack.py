"""`gptddp repack`: a copy of a dataset whose row groups are of the size that `prepare` makes.

The trainer reads a row group as a whole. Those that another program has written may be of
gigabytes: here they are read a few rows at a time, so that memory does not grow with them.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from gptddp.data import pretokenized
from gptddp.data.dataset import COLUMN, GOES_ON, SPLITS, Dataset, open_dataset
from gptddp.data.parquet import open_parquet
from gptddp.data.tokenizer import Tokenizer
from gptddp.errors import DataError
from gptddp.files import fsync
from gptddp.prepare.output import building, check_apart, commit, is_made, tidy
from gptddp.prepare.progress_bar import ProgressBar
from gptddp.prepare.shard_writer import ShardWriter, rows_per_group

_ROWS_AT_ONCE = 256


def repack(
    given: str | os.PathLike[str], out: str | os.PathLike[str], bar: ProgressBar | None = None
) -> Dataset:
    """Write the rows of a dataset, in their order, to the new dataset `out`.

    None is cut: a document in parts has the same ones, with their marks. Null and empty documents
    are left out. All of `out` is made or nothing; what a killed process
    left is removed by the next. If `out` is the same dataset repacked already, nothing is done.
    Raises DataError.
    """
    out, bar = Path(out), bar or ProgressBar()
    dataset = open_dataset(given)
    check_apart([dataset.dir], out)
    if is_made(out):
        return _existing(dataset, out, bar)
    with building(out) as scratch:
        splits = _write(dataset, out, bar)
        if name := dataset.manifest["tokenizer"]["file"]:
            shutil.copyfile(dataset.dir / name, out / name)
            fsync(out / name)
        kept = {k: v for k, v in dataset.manifest.items() if k != "gptddp"}
        commit(out, scratch, {**kept, "splits": splits, "repacked": dataset.sha256})
    return open_dataset(out)


def _write(dataset: Dataset, out: Path, bar: ProgressBar) -> dict[str, Any]:
    """Write all splits; returns what the manifest says of them."""
    splits = {split: dataset.manifest["splits"][split] for split in SPLITS}
    rows = rows_per_group(sum(file["rows"] for file in splits["train"]["files"]))
    bar.begin("writing", total=sum(f["rows"] for s in splits.values() for f in s["files"]))
    made_by = dataset.tokenizer() if dataset.pretokenized else None
    made: dict[str, Any] = {}
    for split, about in splits.items():
        with ShardWriter(out, split, rows, made_by, dataset.is_cut) as writer:
            for file in about["files"]:
                path, n_rows = dataset.dir / file["path"], file["rows"]
                for document, goes_on in _documents(path, n_rows, made_by, dataset.is_cut):
                    if document:
                        writer.add(document, goes_on)
                    bar.advance(1)
            made[split] = {**about, **writer.close()}
    return made


def _documents(
    path: Path, rows: int, made_by: Tokenizer | None, marks: bool
) -> Iterator[tuple[bytes, bool]]:
    """The rows of a shard, as `ShardWriter` takes them, null documents empty.

    Raises DataError, naming the row, for what cannot be read.
    """
    row = 0
    try:
        with open_parquet(path) as file:
            columns = [COLUMN if made_by is None else pretokenized.COLUMN, *[GOES_ON] * marks]
            for records in file.iter_batches(_ROWS_AT_ONCE, columns=columns, use_threads=False):
                if made_by is None:
                    documents = [(text or "").encode() for text in records.column(0).to_pylist()]
                else:
                    documents = pretokenized.to_bytes(records.column(0), made_by)
                goes_on = [False] * len(documents)
                if marks:
                    goes_on = records.column(GOES_ON).to_pylist()
                for one in zip(documents, goes_on, strict=True):
                    row += 1
                    yield one
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise DataError(
            f"cannot read {path} after row {row}: {error}; put the file back from a copy"
        ) from error
    if row != rows:
        raise DataError(f"{path} has {row} rows instead of {rows}: put the file back from a copy")


def _existing(dataset: Dataset, out: Path, bar: ProgressBar) -> Dataset:
    """The dataset that is in `out` already; DataError if it is not `dataset` repacked."""
    made = open_dataset(out)
    if made.manifest.get("repacked") != dataset.sha256:
        raise DataError(
            f"{out} already holds another dataset: choose another --out, or remove {out} first"
        )
    tidy(out)
    bar.say(f"{out} is already {dataset.dir} repacked")
    return made
