"""The first step of `prepare`: every document of the sources into the shuffle, once.

What earlier processes have read is taken over; see scratch.py.

A huge document is cut into parts: rows of the dataset that are shuffled like any others. Otherwise
one lane would get all of it, and hold it in memory several times. All parts but the last are marked
as going on, so that packing does not take the end of a part for the end of a document.
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

# 192 parts, four for each of 48 lanes, are 48 MiB: from there on lanes are alike, whatever the
# documents. At every cut the model loses the context of one training row, of some sixty or more.
PART_BYTES = 256 << 10
PART_IDS = 64 << 10  # of about as much text

BAD = "bad.jsonl"  # the list of bad records, in the scratch folder and in the dataset


class Reading:
    """`shuffle`: what the sources have come to, after `read`; `counts`: what was found in them.

    counts: "empty" documents, "binary" files, "bad" records; and of each kind of file, as in
    "text files" and "text documents", how many there were.
    """

    shuffle: Shuffle

    def __init__(
        self, folder: Path, settings: Settings, made_by: Tokenizer | None, phases: Phases
    ) -> None:
        """`made_by`: the tokenizer of the ids, where the sources are lists of ids."""
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
        """Read what has not been read; raises DataError, OSError, and what is done is kept."""
        scratch = self._scratch
        why_not = scratch.load({file.identity for file in files})
        most, bad = self._settings.max_bad, scratch.counts.get("bad", 0)
        if why_not is None and bad > most:
            why_not = f"--max-bad is {most}, and {bad} records were left out"
        if why_not:
            self._phases.say(f"what was read before cannot be used, starting again: {why_not}")
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
                        f"{len(scratch.done)} files that have been read are kept in "
                        f"{scratch.folder}; the same command goes on after them"
                    )
            with contextlib.suppress(OSError):  # the list of bad records too, to be read
                scratch.close()
            raise
        scratch.close()

    def _read_file(self, file: SourceFile) -> None:
        """Read a file to its end; raises DataError where it changes meanwhile."""
        try:
            self._read_documents(file)
            self.counts[f"{file.kind} files"] += 1
        except NotText as error:
            if file.given:
                raise DataError(
                    f"{show(file.path)} {error}: only UTF-8 text can be read; convert it, as with "
                    "`iconv -t utf-8`, or leave it out"
                ) from None
            self.counts["binary"] += 1
            if self.counts["binary"] <= NAMED:
                self._phases.say(f"{show(file.path)} {error}: skipped, as others like it")
        except UnicodeDecodeError as error:  # it was checked before
            raise changed(file, "it is not UTF-8 any more") from error
        except DataError:
            check_unchanged(file)  # if it has, then that is why
            raise
        check_unchanged(file)

    def _read_documents(self, file: SourceFile) -> None:
        remaining = file.bytes  # not yet shown as read: it may be compressed
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
        """Note a bad record in the list; raises DataError unless it may be left out."""
        between = ":" if place == "line" else f", {place} "
        most, listed = self._settings.max_bad, self._scratch.folder / BAD
        if self.counts["bad"] >= most:
            others = f" (as {most} others, which are in {listed})" if most else ""
            raise DataError(
                f"{show(path)}{between}{number}: {problem}: {fix}, or leave such records out "
                f"with a higher --max-bad{others}"
            )
        self.counts["bad"] += 1
        line = {"file": as_utf8(path), place: number, "reason": problem}
        data = (json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "replace")
        self._scratch.append(BAD, data)

    def said(self, totals: Totals) -> dict[str, Any]:
        """What the manifest says of what was read, and of what was dropped."""
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
        """Put the list of bad records into the dataset, where there are any. Raises OSError."""
        if self.counts["bad"]:
            (out / BAD).write_bytes((self._scratch.folder / BAD).read_bytes())
            fsync(out / BAD)


def cut(document: bytes, made_by: Tokenizer | None = None) -> list[bytes]:
    """The document in parts, in the order of the text; only itself where it is not too long.

    Text (UTF-8) is cut behind a line end, else in front of a space, else between two characters;
    the bytes of ids, where `made_by` is their tokenizer, between two ids.
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
    """Where a part that begins here ends: no part but the last is shorter than half the limit."""
    limit, half = begin + PART_BYTES, begin + PART_BYTES // 2
    if line_end := text.rfind(b"\n", half, limit) + 1:
        return line_end
    if (space := text.rfind(b" ", half, limit)) >= 0:
        return space  # most tokenizers have it in one token with the word behind it
    while text[limit] & 0xC0 == 0x80:  # within a character
        limit -= 1
    return limit
