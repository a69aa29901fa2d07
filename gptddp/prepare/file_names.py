"""Reads the name of a file: its kind, its split, and whether it only describes a dataset."""

import os
import re
from typing import Literal

_COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}
_BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".parquet": "parquet"}
_BY_SUFFIX |= {".csv": "csv", ".tsv": "csv", ".arrow": "arrow"}
# Tables that are not read.
_PROGRAM = "convert it to parquet first, as docs/prepare.md of the sources shows"
TABLES = {
    "csv": f"a CSV table: {_PROGRAM}",
    "arrow": f"an Arrow file, as save_to_disk of Hugging Face's datasets writes: {_PROGRAM}",
}
# Only these text files have splits: `test.py` and `train.py` are ordinary source code.
_SPLIT_TEXT = (".txt", ".text", ".raw", ".tokens")
_ABOUT = re.compile(r"(readme|licen[cs]e|copying)([-._].*)?")
_ABOUT_JSON = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")

SourceSplit = Literal["train", "val", "test"]
_SPLITS: dict[str, SourceSplit] = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


def kind_of(name: str) -> tuple[str, str | None]:
    """text, jsonl, json, parquet or one of TABLES; and pyarrow's name of the compression."""
    stem, suffix = os.path.splitext(name.lower())
    compression = _COMPRESSION.get(suffix)
    if compression:
        suffix = os.path.splitext(stem)[1]
    return _BY_SUFFIX.get(suffix, "text"), compression


def is_about(name: str) -> bool:
    """Is it a dataset card, a dataset info or a license instead of data?"""
    base = os.path.basename(name).lower()
    return base in _ABOUT_JSON or (bool(_ABOUT.fullmatch(base)) and kind_of(base)[0] == "text")


def split_of(name: str) -> SourceSplit | None:
    """The split that a path below a source names: by a folder, else by the file name.

    In a file name the first or last word counts, without shard numbers:
    train-00000-of-00002.parquet, valid.jsonl, wiki.test.raw.
    """
    kind, compression = kind_of(name)
    folders, base = os.path.split(name.lower())
    stem, suffix = os.path.splitext(os.path.splitext(base)[0] if compression else base)
    if kind == "text" and suffix not in _SPLIT_TEXT:
        return None
    words = [word.rstrip("0123456789") for word in re.split("[-_.]", stem)]
    words = [word for word in words if word not in ("", "of")]
    for word in (*folders.split("/"), *words[:1], *words[-1:]):
        if split := _SPLITS.get(word):
            return split
    return None
