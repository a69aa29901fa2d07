"""`gptddp prepare`: makes a dataset from sources; data/dataset.py describes the dataset.

1. read     every document goes into an on-disk shuffle, which also drops copies; huge documents
            are cut into parts (reading.py)
2. train    the tokenizer, on the first documents of the shuffled training split
3. write    the shuffled documents to the two splits (split.py)
4. commit   dataset.json, by rename
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gptddp.data import pretokenized
from gptddp.data.dataset import Dataset, open_dataset
from gptddp.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from gptddp.errors import DataError
from gptddp.files import fsync
from gptddp.prepare import listing, recipe
from gptddp.prepare.listing import PathLike
from gptddp.prepare.output import TOKENIZER_FILE, building, commit, give_up, is_made
from gptddp.prepare.phases import Phases
from gptddp.prepare.reading import Reading
from gptddp.prepare.recipe import DEFAULTS, Settings
from gptddp.prepare.shard_writer import ShardWriter, rows_per_group
from gptddp.prepare.shuffle import Shuffle, Totals
from gptddp.prepare.sources import DOCUMENT_BYTES
from gptddp.prepare.split import Split, choose

# Frequent pairs decide the merges: more text costs time (5 MB/s per core) and gains nothing
# (Python source, vocabulary 4096: 3.34 bytes per token from 64 MiB, 3.33 from 32 MiB).
_TOKENIZER_SAMPLE_BYTES = 32 << 20


def prepare(
    given: Sequence[PathLike],
    out: PathLike,
    settings: Settings = DEFAULTS,
    phases: Phases | None = None,
    val: Sequence[PathLike] = (),
) -> Dataset:
    """Make the dataset `out` from the files and folders `given`; raises DataError.

    `val`: sources of the validation split; without them it is a part of `given`. The same documents
    and settings give the same bytes in every shard, on any machine, however often the process was
    killed. If `out` already is the dataset of the same files and settings, nothing is done. After
    an error `out` is as before, except for data from which the next process continues.
    """
    out, phases = Path(out), phases or Phases()
    definition = recipe.given_tokenizer(settings.tokenizer)
    found = listing.find(given, val, settings.include, settings.exclude, out)
    made_from = recipe.made_from(given, found.files, settings, definition)
    if is_made(out):
        dataset = open_dataset(out)
        if changed := recipe.differences(dataset.manifest, made_from):
            raise DataError(
                f"{out} already holds a dataset with other settings: {'; '.join(changed)}: "
                f"choose another --out, or remove {out} first"
            )
        phases.say(f"{out} is already prepared from these sources with these settings")
        return dataset
    for note in found.notes():
        phases.say(note)
    with building(out) as scratch:
        manifest = _build(found.files, out, scratch, settings, definition, phases)
        commit(out, scratch, {**made_from, "left_out": found.counts(), **manifest})
    return open_dataset(out)


# -- the four steps ------------------------------------------------------------------------------


def _build(
    files: Sequence[listing.SourceFile],
    out: Path,
    scratch: Path,
    settings: Settings,
    definition: bytes | None,
    phases: Phases,
) -> dict[str, Any]:
    """Steps 1 to 3; returns their entries of the manifest."""
    made_by = None  # the tokenizer of the ids, if the sources are lists of ids
    if settings.tokens_field is not None:
        made_by = byte_tokenizer() if definition is None else load_tokenizer(settings.tokenizer)
    reading = Reading(scratch, settings, made_by, phases)
    reading.read(files)
    shuffle, totals = reading.shuffle, reading.shuffle.totals()
    said = reading.said(totals)
    given = any(file.val for file in files)
    if problem := _too_few(totals, given, {**said["dropped"], "bad_records": said["bad_records"]}):
        give_up(scratch)
        raise DataError(problem)
    split = Split(totals.val) if given else choose(shuffle, totals, settings.val_fraction)
    for note in split.notes:
        phases.say(note)
    shuffle.forget_keys()
    if definition is None and settings.tokenizer == "bpe":
        phases.begin("training the tokenizer")
        vocab_size = settings.vocab_size or recipe.default_vocab_size(shuffle.bytes)
        definition = train_bpe(_sample(shuffle, split), vocab_size).encode()
    tokenizer, about = _save_tokenizer(out, definition)
    splits = _write(out, shuffle, split, totals, tokenizer, made_by, phases)
    reading.write_bad(out)
    column = {} if made_by is None else {"column": pretokenized.COLUMN}
    return {**said, "tokenizer": about, **column, "splits": splits}


def _too_few(totals: Totals, val_given: bool, dropped: dict[str, int]) -> str | None:
    """The message if the documents are too few; `dropped`: number of dropped ones, by reason."""
    lost = ", ".join(f"{n} {what.replace('_', ' ')}" for what, n in dropped.items() if n)
    lost = f" (dropped: {lost})" if lost else ""
    if val_given and not totals.val:
        return f"the validation sources hold no document{lost}; give others with --val"
    if val_given and totals.val == totals.documents:
        return (
            f"no document remains for training{lost}: documents of the validation sources are not "
            "used for training; give other sources"
        )
    if val_given or totals.documents > 1:
        return None
    return (
        f"the sources hold {totals.documents} documents{lost}: at least 2 different ones are "
        "needed, one of them for validation; give more text (a text file is cut into documents of "
        f"{DOCUMENT_BYTES >> 10} KiB, a line of JSONL is one document)"
    )


def _sample(shuffle: Shuffle, split: Split) -> Iterator[str]:
    """The first texts of the training split, for the tokenizer."""
    left_bytes = _TOKENIZER_SAMPLE_BYTES
    for key, text, given, _ in shuffle:
        if left_bytes <= 0:
            return
        if not (given or key in split.keys):
            yield text.decode()
            left_bytes -= len(text)


def _save_tokenizer(out: Path, definition: bytes | None) -> tuple[Tokenizer, dict[str, Any]]:
    """Write a BPE to tokenizer.json; returns the tokenizer and its entry of the manifest."""
    about: dict[str, Any] = {"kind": "bytes", "file": None}
    tokenizer = byte_tokenizer()
    if definition is not None:
        path = out / TOKENIZER_FILE
        path.write_bytes(definition)
        fsync(path)
        tokenizer = load_tokenizer(path)
        about = {"kind": tokenizer.kind, "file": TOKENIZER_FILE, "bytes": len(definition)}
    about |= {k: getattr(tokenizer, k) for k in ("sha256", "vocab_size", "bos")}
    return tokenizer, about


def _write(
    out: Path,
    shuffle: Iterable[tuple[bytes, bytes, bool, bool]],
    split: Split,
    totals: Totals,
    tokenizer: Tokenizer,
    made_by: Tokenizer | None,
    phases: Phases,
) -> dict[str, Any]:
    """Write both splits; returns their entries of the manifest."""
    rows, marks = rows_per_group(totals.rows - split.documents), totals.cut > 0
    phases.begin("writing", total=totals.rows)
    encode = tokenizer.encoder()
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    with (
        ShardWriter(out, "val", rows, tokenizer, made_by is not None, marks) as val,
        ShardWriter(out, "train", rows, tokenizer, made_by is not None, marks) as train,
    ):
        for key, text, given, goes_on in shuffle:
            phases.advance(1)
            if not (given or key in split.keys):
                train.add(text, goes_on)
                continue
            val.add(text, goes_on)
            found = encode(text.decode()) if made_by is None else pretokenized.ids_of(text, made_by)
            counts += np.bincount(found, minlength=len(counts))
        entropy = unigram_entropy_nats(counts)
        about = {"tokens": int(counts.sum()), "unigram_entropy_nats": round(entropy, 6)}
        return {"train": train.close(), "val": {**val.close(), **about}}


def unigram_entropy_nats(counts: np.ndarray) -> float:
    """Entropy of the token frequencies, in nats: the loss of a model that knows only them."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum()) + 0.0  # never -0.0
