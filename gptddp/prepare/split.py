"""Chooses the validation documents, a fraction of all, if no validation source is given."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gptddp.prepare.shuffle import Shuffle, Totals


@dataclass
class Split:
    """The keys of the validation entries, and the number of their documents."""

    documents: int = 0
    keys: set[bytes] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)  # for the user

    def take(self, keys: Sequence[bytes], number: int) -> None:
        """Add a whole document or file, which counts as `number` documents."""
        self.documents += number
        self.keys.update(keys)


def choose(shuffle: Shuffle, totals: Totals, fraction: float) -> Split:
    """Take the first documents by key, `fraction` of all and at least one, for validation.

    The pieces of a file stay together, at the place of its first piece; so do the parts of a
    document, which counts as one. A file with more pieces than are still needed is skipped. If
    every file is too large, the smallest is taken; of a single file, its end.
    """
    wanted = min(totals.documents - 1, max(1, round(totals.documents * fraction)))
    split = Split()
    found: dict[bytes, dict[bytes, None]] = {}  # ordered sets
    for first, key in shuffle.pieces():
        found.setdefault(first, {first: None})[key] = None
    files = {first: list(keys) for first, keys in found.items()}
    pieces = {key for keys in files.values() for key in keys}
    numbers: dict[bytes, int] = {}  # documents of each piece: 0 of most parts
    if files:
        numbers = {key: number for key, number in shuffle.counts() if key in pieces}
    sizes = {first: sum(numbers[key] for key in keys) for first, keys in files.items()}
    whole = (unit for unit in shuffle.counts() if unit[0] not in pieces)
    units, smallest = 0, (totals.documents + 1, b"")
    for key, number in heapq.merge(whole, sorted(sizes.items())):
        units += 1
        smallest = min(smallest, (number, key))
        if split.documents + number <= wanted:
            split.take(files.get(key, [key]), number)
        if split.documents == wanted:
            break
    if not split.documents and units > 1:
        number, key = smallest
        split.take(files.get(key, [key]), number)
    elif not split.documents:
        _take_the_end(split, files[smallest[1]], numbers, wanted)
    if not wanted / 2 <= split.documents <= 2 * wanted:
        split.notes.append(
            f"validation has {split.documents} of {totals.documents} documents instead of {wanted}:"
            " the pieces of a file stay together; give more files, or validation files with --val"
        )
    return split


def _take_the_end(
    split: Split, keys: Sequence[bytes], numbers: Mapping[bytes, int], wanted: int
) -> None:
    """Take the last pieces of the only file."""
    for key in reversed(keys[1:]):
        if split.documents < wanted:
            split.take([key], numbers[key])
    split.notes.append(
        f"the source is a single file: the last {len(split.keys)} of its {len(keys)} pieces are "
        "the validation split; to validate on another text, give it with --val"
    )
