"""`gptddp prepare`: sources in, a dataset out; data/dataset.py describes the dataset.

1. read     every document goes into an on-disk shuffle, which also drops copies
2. train    the tokenizer, on the first documents of the shuffled training split
3. write    the shuffled documents: the first are the validation split, the others train
4. commit   dataset.json, by rename
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gptddp.data import pretokenized
from gptddp.data.dataset import MANIFEST, Dataset, open_dataset
from gptddp.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from gptddp.errors import DataError
from gptddp.files import fsync
from gptddp.prepare import listing, recipe, refusals, sources, token_lists
from gptddp.prepare.output import TOKENIZER_FILE, building, check_apart, commit, tidy
from gptddp.prepare.progress_bar import ProgressBar
from gptddp.prepare.recipe import DEFAULTS, Settings
from gptddp.prepare.shard_writer import ShardWriter, rows_per_group
from gptddp.prepare.shuffle import Shuffle

# Frequent pairs decide the merges: more text than this costs time (5 MB/s a core) and gains nothing
# (Python source, vocabulary 4096: 3.34 bytes a token from 64 MiB, 3.33 from 32).
_TOKENIZER_SAMPLE_BYTES = 32 << 20

PathLike = str | os.PathLike[str]


def prepare(
    given: Sequence[PathLike],
    out: PathLike,
    settings: Settings = DEFAULTS,
    bar: ProgressBar | None = None,
) -> Dataset:
    """Make the dataset `out` of the files and folders `given`; raises DataError.

    The same documents and settings give the same bytes in every shard, on any machine. If `out` is
    the dataset of the same files and settings already, nothing is done. After an error `out` is as
    it was before.
    """
    out, bar = Path(out), bar or ProgressBar()
    check_apart(given, out)
    refusals.check_no_dataset(given)
    definition = recipe.given_tokenizer(settings.tokenizer)
    files = listing.find(given, settings.include, settings.exclude, skip=out)
    if not files:
        raise refusals.no_files(given, settings)
    made_from = recipe.made_from(given, files, settings, definition)
    if os.path.exists(out / MANIFEST):
        return _existing(out, made_from, bar)
    with building(out) as scratch:
        manifest = _build(files, out, scratch, settings, definition, bar)
        commit(out, scratch, {**made_from, **manifest})
    return open_dataset(out)


def _existing(out: Path, made_from: dict[str, Any], bar: ProgressBar) -> Dataset:
    """The dataset that is in `out` already; DataError if it is not the one that was asked for."""
    dataset = open_dataset(out)
    if changed := recipe.differences(dataset.manifest, made_from):
        raise DataError(
            f"{out} already holds a dataset made otherwise: {'; '.join(changed)}: "
            f"choose another --out, or remove {out} first"
        )
    tidy(out)
    bar.say(f"{out} is already prepared from these sources with these settings")
    return dataset


# -- the four steps ------------------------------------------------------------------------------


def _build(
    files: Sequence[listing.SourceFile],
    out: Path,
    scratch: Path,
    settings: Settings,
    definition: bytes | None,
    bar: ProgressBar,
) -> dict[str, Any]:
    """Steps 1 to 3; returns what the manifest says of them."""
    made_by = None  # the tokenizer of the ids, where the sources are lists of ids
    if settings.tokens_field is not None:
        made_by = byte_tokenizer() if definition is None else load_tokenizer(settings.tokenizer)
    with contextlib.closing(Shuffle(scratch / "shuffle", settings.seed)) as shuffle:
        dropped = _read(files, shuffle, settings, made_by, bar)
        documents, dropped["duplicate"] = shuffle.finish()
        if documents < 2:
            raise refusals.too_few(documents, dropped)
        val_documents = min(documents - 1, max(1, round(documents * settings.val_fraction)))
        if definition is None and settings.tokenizer == "bpe":
            bar.begin("training the tokenizer")
            sample = _first(islice(shuffle, val_documents, None), _TOKENIZER_SAMPLE_BYTES)
            vocab_size = settings.vocab_size or recipe.default_vocab_size(shuffle.bytes)
            definition = train_bpe(sample, vocab_size).encode()
        tokenizer, about = _save_tokenizer(out, definition)
        splits = _write(out, shuffle, documents, val_documents, tokenizer, made_by, bar)
    column = {} if made_by is None else {"column": pretokenized.COLUMN}
    return {"dropped": dropped, "tokenizer": about, **column, "splits": splits}


def _read(
    files: Sequence[listing.SourceFile],
    shuffle: Shuffle,
    settings: Settings,
    made_by: Tokenizer | None,
    bar: ProgressBar,
) -> dict[str, int]:
    """Put all documents into the shuffle; returns how many were dropped, by reason."""
    dropped = {"empty": 0, "duplicate": 0, "binary_files": 0}
    binary = []
    bar.begin(f"reading {len(files)} files", total=sum(file.bytes for file in files))
    for file in files:
        texts: Iterator[bytes] | None
        if made_by is None:
            texts = sources.documents(file, settings.text_field)
        else:
            texts = token_lists.documents(file, str(settings.tokens_field), made_by)
        if texts is None:
            binary.append(listing.show(file.path))
            texts = iter(())
        left = file.bytes  # of the file's size, not yet shown as read: it may be compressed
        for text in texts:
            if text.decode().strip() if made_by is None else text:
                shuffle.add(text)
            else:
                dropped["empty"] += 1
            size = min(left, len(text))
            left -= size
            bar.advance(size)
        bar.advance(left)
    dropped["binary_files"] = len(binary)
    if binary:
        more = ", ..." if len(binary) > 3 else ""
        bar.say(f"skipped, not UTF-8 text: {len(binary)} ({', '.join(binary[:3])}{more})")
    return dropped


def _save_tokenizer(out: Path, definition: bytes | None) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and what the manifest says of it; a BPE is written to tokenizer.json."""
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
    shuffle: Iterable[bytes],
    documents: int,
    val_documents: int,
    tokenizer: Tokenizer,
    made_by: Tokenizer | None,
    bar: ProgressBar,
) -> dict[str, Any]:
    """Write both splits; returns what the manifest says of them."""
    rows = rows_per_group(documents - val_documents)
    bar.begin("writing", total=documents)
    encode = tokenizer.encoder()
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    order = iter(shuffle)
    with (
        ShardWriter(out, "val", rows, made_by) as val,
        ShardWriter(out, "train", rows, made_by) as train,
    ):
        for text in islice(order, val_documents):
            val.add(text)
            found = encode(text.decode()) if made_by is None else pretokenized.ids_of(text, made_by)
            counts += np.bincount(found, minlength=len(counts))
            bar.advance(1)
        for text in order:
            train.add(text)
            bar.advance(1)
        entropy = unigram_entropy_nats(counts)
        about = {"tokens": int(counts.sum()), "unigram_entropy_nats": round(entropy, 6)}
        return {"train": train.close(), "val": {**val.close(), **about}}


def unigram_entropy_nats(counts: np.ndarray) -> float:
    """Entropy of a token drawn by these counts, in nats: the loss of a model that knows no more."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def _first(texts: Iterable[bytes], limit_bytes: int) -> Iterator[str]:
    """The first texts, until they have `limit_bytes` together."""
    for text in texts:
        if limit_bytes <= 0:
            return
        yield text.decode()
        limit_bytes -= len(text)
