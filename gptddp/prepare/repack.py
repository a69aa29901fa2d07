"""`gptddp repack`: the shards of a dataset again, with row groups of the size that lanes want.

A row group is read and kept as a whole. Those of a dataset that another program has written may be
of gigabytes; these are read in small batches here, so memory stays flat.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from gptddp.data import pretokenized
from gptddp.data.dataset import COLUMN, MANIFEST, SPLITS, Dataset, open_dataset
from gptddp.data.parquet import open_parquet
from gptddp.data.tokenizer import Tokenizer
from gptddp.errors import DataError
from gptddp.files import fsync
from gptddp.prepare import output
from gptddp.prepare.build import OUTPUTS, check_apart, commit, rows_per_group, write_errors
from gptddp.prepare.output import tidy
from gptddp.prepare.progress_bar import Progress
from gptddp.prepare.shard_writer import ShardWriter

_BATCH_ROWS = 256


def repack(
    given: str | os.PathLike[str], out: str | os.PathLike[str], progress: Progress | None = None
) -> Dataset:
    """Write the documents of a dataset, in their order, to the new dataset `out`.

    Null and empty documents are left out. All of `out` or nothing: what a killed process left is
    removed by the next. If `out` is the same dataset repacked already, nothing is done. Raises
    DataError.
    """
    out, progress = Path(out), progress or Progress(None)
    dataset = open_dataset(given)
    check_apart([dataset.dir], out)
    if os.path.exists(out / MANIFEST):
        return _existing(dataset, out, progress)
    with (
        write_errors(out),
        output.claim(out, OUTPUTS, last=MANIFEST) as scratch,
    ):
        splits = _write(dataset, out, progress)
        if name := dataset.manifest["tokenizer"]["file"]:
            shutil.copyfile(dataset.dir / name, out / name)
            fsync(out / name)
        kept = {k: v for k, v in dataset.manifest.items() if k != "gptddp"}
        commit(out, scratch, {**kept, "splits": splits, "repacked": dataset.sha256})
    return open_dataset(out)


def _write(dataset: Dataset, out: Path, progress: Progress) -> dict[str, Any]:
    splits = {split: dataset.manifest["splits"][split] for split in SPLITS}
    rows = rows_per_group(sum(file["rows"] for file in splits["train"]["files"]))
    progress.start("writing", total=sum(f["rows"] for s in splits.values() for f in s["files"]))
    ids = dataset.tokenizer() if dataset.pretokenized else None
    made: dict[str, Any] = {}
    for split, about in splits.items():
        with ShardWriter(out, split, rows, ids) as writer:
            for file in about["files"]:
                for document in _documents(dataset.dir / file["path"], file["rows"], ids):
                    if document:
                        writer.add(document)
                    progress.advance(1)
            made[split] = {**about, **writer.close()}
    return made


def _documents(path: Path, rows: int, ids: Tokenizer | None) -> Iterator[bytes]:
    """The documents of a shard, as `ShardWriter` takes them, null ones empty.

    Raises DataError, naming the row, for what cannot be read.
    """
    row = 0
    try:
        with open_parquet(path) as file:
            columns = [COLUMN if ids is None else pretokenized.COLUMN]
            for batch in file.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False):
                if ids is None:
                    documents = [(text or "").encode() for text in batch.column(0).to_pylist()]
                else:
                    documents = pretokenized.to_bytes(batch.column(0), ids)
                for document in documents:
                    row += 1
                    yield document
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(
            f"cannot read {path} after row {row}: {error}; put the file back from a copy"
        ) from error
    if row != rows:
        raise DataError(f"{path} has {row} rows instead of {rows}: put the file back from a copy")


def _existing(dataset: Dataset, out: Path, progress: Progress) -> Dataset:
    made = open_dataset(out)
    if made.manifest.get("repacked") != dataset.sha256:
        raise DataError(
            f"{out} already holds another dataset: choose another --out, or remove {out} first"
        )
    tidy(out)
    progress.note(f"{out} is already {dataset.dir} repacked")
    return made


def summary(dataset: Dataset) -> str:
    """What has been made, and what to type next."""
    groups = [group for split in SPLITS for group in dataset.row_groups(split)]
    largest = max(group.text_bytes for group in groups)
    documents = sum(group.rows for group in groups)
    return f"""\
documents   {documents:,}
row groups  {len(groups):,}, of up to {max(group.rows for group in groups):,} documents and \
{largest / 1e6:,.1f} MB of text
dataset     {dataset.dir}
next        gptddp train --data {dataset.dir} --run-dir RUN"""
