"""The first step of `prepare`: put every document of the sources into the shuffle, once.

Documents that earlier processes have read are not read again; see scratch.py.

A huge document is cut into parts, rows of the dataset that are shuffled like any others. Otherwise
one lane would get all of it, and hold it in memory several times. All parts except the last are
marked, so that packing does not take the end of a part for the end of a document.
"""

import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gptddp.data.tokenizer import Tokenizer
from gptddp.errors import DataError
from gptddp.files import fsync
from gptddp.prepare.listing import NAMED, SourceFile, changed, check_unchanged
from gptddp.prepare.phases import Phases
from gptddp.prepare.recipe import Settings
from gptddp.prepare.scratch import Scratch
from gptddp.prepare.shuffle import Shuffle, Totals
from gptddp.prepare.sources import NotText, documents
from gptddp.prepare.walk import as_utf8, show

# 192 parts, four for each of 48 lanes, are 48 MiB: from this size on lanes are alike, whatever the
# documents. Each cut shortens the context of one training row in sixty or more.
PART_BYTES = 256 << 10
PART_IDS = 64 << 10  # ids of about as much text

BAD = "bad.jsonl"  # the list of bad records, in the scratch folder and in the dataset


class Reading:
    """`shuffle`: all documents, after `read`.

    counts: "empty" documents, "binary" files, "bad" records; and for each kind of file its files
    and documents, as in "text files" and "text documents".
    """

    shuffle: Shuffle

    def __init__(
        self, folder: Path, settings: Settings, made_by: Tokenizer | None, phases: Phases
    ) -> None:
        """`made_by`: the tokenizer of the ids, if the sources are lists of ids."""
        self._settings, self._made_by, self._phases = settings, made_by, phases
        how = {
            "text_field": settings.text_field,
            "tokens_field": settings.tokens_field,
            "tokenizer": made_by and made_by.sha256,
            "seed": settings.seed,
            "parts": [PART_BYTES, PART_IDS],
        }
        self._scratch = Scratch(folder, how)
        self.counts: Counter[str] = Counter()

    def read(self, files: Sequence[SourceFile]) -> None:
        """Read the remaining sources. Raises DataError or OSError; finished sources are kept."""
        scratch = self._scratch
        why_not = scratch.load({file.identity for file in files})
        most, bad = self._settings.max_bad, scratch.counts.get("bad", 0)
        if why_not is None and bad > most:
            why_not = f"--max-bad is {most}, and {bad} records were skipped"
        if why_not:
            self._phases.say(f"earlier progress cannot be used, starting again: {why_not}")
            scratch.clear()
        self.counts.update(scratch.counts)
        self.shuffle = Shuffle(scratch, self._settings.seed)
        rest = [file for file in files if file.identity not in scratch.done]
        before = f" ({len(scratch.done)} have been read before)" if scratch.done else ""
        self._phases.begin(f"reading {len(rest)} files{before}", sum(file.bytes for file in rest))
        try:
            for file in rest:
                self._read_file(file)
                scratch.finish(file.identity, self.counts)
        except BaseException:
            with contextlib.suppress(OSError):
                scratch.save()
                if scratch.done:
                    self._phases.say(
                        f"{len(scratch.done)} files have been read and are kept in "
                        f"{scratch.folder}; the same command continues after them"
                    )
            with contextlib.suppress(OSError):  # it also flushes the list of bad records
                scratch.close()
            raise
        scratch.close()

    def _read_file(self, file: SourceFile) -> None:
        """Read a file to its end; raises DataError if it changes meanwhile."""
        try:
            self._read_documents(file)
            self.counts[f"{file.kind} files"] += 1
        except NotText as error:
            if file.given:
                raise DataError(
                    f"{show(file.path)} {error}: only UTF-8 text can be read; convert it, as with "
                    "`iconv -t utf-8`, or do not give it"
                ) from None
            self.counts["binary"] += 1
            if self.counts["binary"] <= NAMED:
                self._phases.say(f"{show(file.path)} {error}: skipped, like all such files")
        except UnicodeDecodeError as error:  # it was checked before
            raise changed(file, "it is no longer UTF-8") from error
        except DataError:
            check_unchanged(file)  # a change is the cause of the error
            raise
        check_unchanged(file)

    def _read_documents(self, file: SourceFile) -> None:
        remaining = file.bytes  # not yet counted as progress; the file may be compressed
        first = None
        for place, number, found in documents(file, self._settings, self._made_by):
            if isinstance(found, tuple):
                self._note(file.path, place, number, *found)
                continue
            self.counts[f"{file.kind} documents"] += 1
            if found.decode().strip() if self._made_by is None else found:
                key = self.shuffle.add(cut(found, self._made_by), file.val, first)
                if file.kind == "text":
                    first = first or key
            else:
                self.counts["empty"] += 1
            size = min(remaining, len(found))
            remaining -= size
            self._phases.advance(size)
        self._phases.advance(remaining)

    def _note(self, path: str, place: str, number: int, problem: str, fix: str) -> None:
        """Add a bad record to the list; raises DataError if it must not be skipped."""
        between = ":" if place == "line" else f", {place} "
        most, listed = self._settings.max_bad, self._scratch.folder / BAD
        if self.counts["bad"] >= most:
            others = f" ({most} others are listed in {listed})" if most else ""
            raise DataError(
                f"{show(path)}{between}{number}: {problem}: {fix}, or skip such records with a "
                f"higher --max-bad{others}"
            )
        self.counts["bad"] += 1
        line = {"file": as_utf8(path), place: number, "reason": problem}
        data = (json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        self._scratch.append(BAD, data)

    def said(self, totals: Totals) -> dict[str, Any]:
        """The manifest's entries for documents read, dropped and cut."""
        counts = self.counts
        kinds = sorted(name.split()[0] for name in counts if name.endswith(" files"))
        cut = {"cut": {"documents": totals.cut, "parts": totals.parts}} if totals.cut else {}
        return {
            "read": {
                kind: [counts[f"{kind} files"], counts[f"{kind} documents"]] for kind in kinds
            },
            "dropped": {
                "empty": counts["empty"],
                "duplicate": totals.dropped,
                "binary_files": counts["binary"],
            },
            "bad_records": counts["bad"],
            **cut,
        }

    def write_bad(self, out: Path) -> None:
        """Copy the list of bad records, if any, into the dataset. Raises OSError."""
        if self.counts["bad"]:
            (out / BAD).write_bytes((self._scratch.folder / BAD).read_bytes())
            fsync(out / BAD)


def cut(document: bytes, made_by: Tokenizer | None = None) -> list[bytes]:
    """Cut a long document into parts, in order; a short one is its only part.

    Text (UTF-8) is cut behind a line end, else in front of a space, else between two characters;
    with `made_by`, the tokenizer of the ids, the bytes of ids are cut between two ids.
    """
    if made_by is not None:
        size = PART_IDS * np.dtype(made_by.dtype).itemsize
        return [document[at : at + size] for at in range(0, len(document), size)]
    parts, at = [], 0
    while len(document) - at > PART_BYTES:
        end = _end(document, at)
        parts.append(document[at:end])
        at = end
    return [*parts, document[at:]]


def _end(text: bytes, begin: int) -> int:
    """The end of the part that starts at `begin`: at least half the limit from it."""
    limit, half = begin + PART_BYTES, begin + PART_BYTES // 2
    if line_end := text.rfind(b"\n", half, limit) + 1:
        return line_end
    if (space := text.rfind(b" ", half, limit)) >= 0:
        return space  # most tokenizers put it into one token with the next word
    while text[limit] & 0xC0 == 0x80:  # within a character
        limit -= 1
    return limit
