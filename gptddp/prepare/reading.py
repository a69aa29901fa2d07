"""The first step of `prepare`: every document of the sources into the shuffle, once.

What earlier processes have read is taken over; see journal.py.
"""

import contextlib
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptddp.data.tokenizer import Tokenizer
from gptddp.errors import DataError
from gptddp.prepare import sources, token_lists
from gptddp.prepare.bad_records import MAX_BAD, BadRecords
from gptddp.prepare.journal import Done, Journal
from gptddp.prepare.listing import NAMED, SourceFile, changed, check_unchanged, some
from gptddp.prepare.parts import PART_BYTES, PART_IDS, cut
from gptddp.prepare.progress_bar import ProgressBar
from gptddp.prepare.recipe import Settings
from gptddp.prepare.shuffle import Shuffle
from gptddp.prepare.walk import show


@dataclass
class Tally:
    """What has been read of finished files."""

    files: dict[str, int] = field(default_factory=dict)  # by kind
    documents: dict[str, int] = field(default_factory=dict)  # by kind, empty ones too
    empty: int = 0
    binary: int = 0  # files
    binary_names: list[str] = field(default_factory=list)  # the first
    bad: int = 0  # records
    bad_bytes: int = 0  # of their list

    def binary_note(self) -> str:
        """Which files of folders were no text."""
        return f"skipped, not UTF-8 text: {some(self.binary_names, self.binary)}"


class Reading:
    """`shuffle`, `tally` and `bad`: what the sources have come to, after `read`."""

    def __init__(
        self, scratch: Path, settings: Settings, made_by: Tokenizer | None, bar: ProgressBar
    ) -> None:
        """`made_by`: the tokenizer of the ids, where the sources are lists of ids."""
        self._scratch, self._settings, self._made_by, self._bar = scratch, settings, made_by, bar
        self._max_bad = MAX_BAD if settings.max_bad is None else settings.max_bad
        self._journal = Journal(scratch, _head(settings, made_by))
        self._unsaved = Done()  # the files since the journal's last line, and all lengths by then

    def read(self, files: Sequence[SourceFile]) -> None:
        """Read what has not been read; raises DataError, OSError, and what is done is kept."""
        done = self._take_over(files)
        self._finished = len(done)
        rest = [file for file in files if file.identity not in done]
        before = f" ({len(done)} have been read before)" if done else ""
        self._bar.begin(f"reading {len(rest)} files{before}", sum(file.bytes for file in rest))
        try:
            for file in rest:
                self._read_file(file)
                self._finished += 1
                self._unsaved.files.add(file.identity)
                self._unsaved.lengths, self._unsaved.tally = self.shuffle.lengths(), self._counts()
                if self._journal.due():
                    self._save()
        except BaseException:
            self._keep()
            raise
        if self._journal.due():
            self._save()

    def _take_over(self, files: Sequence[SourceFile]) -> set[str]:
        """Open what an earlier process has left, if it can be used; identities of its files."""
        done, why_not = self._journal.load(files)
        tally = Tally(**done.tally)
        if self._settings.on_bad == "fail" and tally.bad:
            why_not = f"--on-bad skip -> fail, and {tally.bad} bad records were left out"
        elif tally.bad > self._max_bad:
            why_not = f"--max-bad is {self._max_bad}, and {tally.bad} bad records were left out"
        if why_not is None:
            try:
                self._open(done.lengths, tally)
                return done.files
            except (ValueError, FileNotFoundError) as error:
                why_not = str(error)
        self._bar.say(f"what was read before cannot be used, starting again: {why_not}")
        self._journal.begin()
        shutil.rmtree(self._scratch / "shuffle", ignore_errors=True)
        self._open({}, Tally())
        return set()

    def _open(self, lengths: dict[str, int], tally: Tally) -> None:
        settings = self._settings
        self.shuffle = Shuffle(
            self._scratch / "shuffle", settings.seed, settings.keep_copies, lengths
        )
        self.tally = tally
        made = tally.bad, tally.bad_bytes
        self.bad = BadRecords(self._scratch, settings.on_bad, self._max_bad, made)

    def _read_file(self, file: SourceFile) -> None:
        """Read a file to its end; raises DataError where it changes meanwhile."""
        try:
            self._read_documents(file)
        except UnicodeDecodeError as error:  # it was checked before
            raise changed(file, "it is not UTF-8 any more") from error
        except DataError:
            check_unchanged(file)  # if it has, then that is why
            raise
        check_unchanged(file)

    def _read_documents(self, file: SourceFile) -> None:
        tally = self.tally
        if self._made_by is None:
            texts = sources.documents(file, self._settings.text_field, self.bad)
        else:
            field = str(self._settings.tokens_field)
            texts = token_lists.documents(file, field, self._made_by, self.bad)
        left = file.bytes  # of the file's size, not yet shown as read: it may be compressed
        if texts is None:
            tally.binary += 1
            tally.binary_names = [*tally.binary_names, show(file.path)][:NAMED]
        else:
            tally.files[file.kind] = tally.files.get(file.kind, 0) + 1
            tally.documents.setdefault(file.kind, 0)
        first = None
        for text in texts or ():
            tally.documents[file.kind] += 1
            if text.decode().strip() if self._made_by is None else text:
                key = self.shuffle.add(text, file.val, first, cut(text, self._made_by))
                if file.kind == "text":
                    first = first or key
            else:
                tally.empty += 1
            size = min(left, len(text))
            left -= size
            self._bar.advance(size)
        self._bar.advance(left)

    def _counts(self) -> dict[str, Any]:
        tally = self.tally
        tally.bad, tally.bad_bytes = self.bad.count, self.bad.bytes
        # `asdict` after every file would take a seventh of the time of many small ones
        copies = {"files": dict(tally.files), "documents": dict(tally.documents)}
        return vars(tally) | copies | {"binary_names": [*tally.binary_names]}

    def _save(self) -> None:
        """Make what was read of finished files durable, then say so in the journal."""
        if not self._unsaved.files:
            return
        begin = time.monotonic()
        self.shuffle.save()
        self.bad.save()
        self._journal.add(self._unsaved)
        self._unsaved = Done(lengths=self._unsaved.lengths, tally=self._unsaved.tally)
        self._journal.took(time.monotonic() - begin)

    def _keep(self) -> None:
        """After an error: save the files that are whole, and say so."""
        with contextlib.suppress(OSError):
            self.bad.save()  # all of it, to be read
            self._save()
            if self._finished:
                self._bar.say(
                    f"{self._finished} files that have been read are kept in {self._scratch}; the "
                    "same command goes on after them"
                )
        with contextlib.suppress(OSError):
            self.shuffle.close()


def _head(settings: Settings, made_by: Tokenizer | None) -> dict[str, Any]:
    """What decides how a file is read."""
    return {
        "text_field": settings.text_field,
        "tokens_field": settings.tokens_field,
        "tokenizer": made_by and made_by.sha256,
        "seed": settings.seed,
        "parts": [PART_BYTES, PART_IDS],
    }
