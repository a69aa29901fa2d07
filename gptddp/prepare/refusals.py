"""Sources that no dataset can be made of: the messages, with the fix."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from gptddp.data.dataset import is_dataset
from gptddp.errors import DataError
from gptddp.prepare.listing import show
from gptddp.prepare.recipe import Settings
from gptddp.prepare.sources import DOCUMENT_BYTES


def check_no_dataset(given: Sequence[str | os.PathLike[str]]) -> None:
    """Refuse a dataset as a source: its manifest would be taken for a text as well."""
    for source in given:
        if is_dataset(Path(source)):
            shown = show(os.fspath(source))
            raise DataError(
                f"the source {shown} is a dataset already, for `gptddp train --data`; to prepare "
                f"its documents again, give {shown}/train and {shown}/val"
            )


def no_files(given: Sequence[str | os.PathLike[str]], settings: Settings) -> DataError:
    """The sources have no file to read."""
    names = ", ".join(show(os.fspath(source)) for source in given)
    fix = "give text, .jsonl or .parquet files, or a folder of them"
    if settings.include or settings.exclude:
        fix = "check --include and --exclude, which are compared with names"
    return DataError(f"{names}: no files to read; {fix}")


def too_few(documents: int, dropped: Mapping[str, int]) -> DataError:
    """The sources have too few documents; `dropped`: how many were dropped, by reason."""
    lost = ", ".join(f"{n} {what.replace('_', ' ')}" for what, n in dropped.items() if n)
    return DataError(
        f"the sources hold {documents} documents{f' (dropped: {lost})' if lost else ''}: at least "
        "2 different ones are needed, one of them for validation; give more text (a text file "
        f"is cut into documents of {DOCUMENT_BYTES >> 10} KiB, a line of JSONL is one)"
    )
