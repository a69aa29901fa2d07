"""Which documents are for validation, where no source is given for it: a part of all."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gptddp.prepare.shuffle import Shuffle, Totals


@dataclass
class Split:
    """The keys of what is for validation, and of how many documents that is."""

    documents: int = 0
    keys: set[bytes] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)  # for the user

    def take(self, keys: Sequence[bytes], number: int) -> None:
        """Take a whole document or file, of `number` documents."""
        self.documents += number
        self.keys.update(keys)


def choose(shuffle: Shuffle, totals: Totals, fraction: float) -> Split:
    """The first documents by key, as many as `fraction` of all, at least one.

    The pieces of a file go to one side, at the place of its first piece; so do the parts of a
    document, which counts as one. A file with more pieces than are still wanted is passed over.
    Where nothing is small enough the smallest file is taken, and of an only file its end.
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
            f"validation has {split.documents} of {totals.documents} documents in place of {wanted}"
            ": the pieces of a file stay together; give more files, or an own source with --val"
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
        f"there is but one file: the last {len(split.keys)} of its {len(keys)} pieces are the "
        "validation split; to have it of another text, name that with --val"
    )
