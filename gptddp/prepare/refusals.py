"""Sources that no dataset can be made of: the messages, with the fix."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from gptddp.data.dataset import is_dataset
from gptddp.errors import DataError
from gptddp.prepare import listing
from gptddp.prepare.recipe import Settings
from gptddp.prepare.shuffle import Totals
from gptddp.prepare.sources import DOCUMENT_BYTES
from gptddp.prepare.walk import show


def check_no_dataset(given: Sequence[str | os.PathLike[str]]) -> None:
    """Refuse a dataset as a source: its manifest would be taken for a text as well."""
    for source in given:
        shown = show(os.fspath(source))
        try:
            refused = is_dataset(Path(source))
        except OSError as error:
            raise DataError(f"cannot read {shown}: {error.strerror}; check the path") from None
        if refused:
            raise DataError(
                f"the source {shown} is a dataset already, for `gptddp train --data`; to prepare "
                f"its documents again, give {shown}/train and {shown}/val"
            )


def no_files(
    given: Sequence[str | os.PathLike[str]],
    settings: Settings,
    found: listing.Listing,
) -> DataError:
    """The sources have no file to read."""
    names = ", ".join(show(os.fspath(source)) for source in given)
    fix = "give text, .jsonl, .json or .parquet files, or a folder of them"
    if settings.include or settings.exclude:
        fix = "check --include and --exclude, which are compared with names"
    if conversions := found.conversions():
        fix = "; ".join(conversions)
    lost = ", ".join(f"{number} {why}" for why, number in found.counts().items())
    return DataError(f"{names}: no files to read{f' (left out: {lost})' if lost else ''}; {fix}")


def too_few(totals: Totals, val_given: bool, dropped: Mapping[str, int]) -> DataError | None:
    """The error where there are too few documents; `dropped`: how many, by reason."""
    lost = ", ".join(f"{n} {what.replace('_', ' ')}" for what, n in dropped.items() if n)
    lost = f" (dropped: {lost})" if lost else ""
    if val_given and not totals.val:
        return DataError(f"the validation sources hold no document{lost}; give others with --val")
    if val_given and totals.val == totals.documents:
        return DataError(
            f"no document is left for training{lost}: those of the validation sources are not "
            "trained on; give other sources"
        )
    if val_given or totals.different > 1:
        return None
    return DataError(
        f"the sources hold {totals.documents} documents{lost}: at least 2 different ones are "
        "needed, one of them for validation; give more text (a text file is cut into documents of "
        f"{DOCUMENT_BYTES >> 10} KiB, a line of JSONL is one)"
    )
