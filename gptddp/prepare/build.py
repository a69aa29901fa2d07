"""`gptddp prepare`: sources in, a dataset out. `corpus` describes the dataset.

1. read     every document goes into an on-disk shuffle, which also drops copies
2. train    the tokenizer, on the first documents of the shuffled training split
3. write    the shuffled documents: the first are the validation split, the others train
4. commit   dataset.json, by rename
"""

import contextlib
import errno
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from gptddp import __version__
from gptddp.data import pretokenized
from gptddp.data.dataset import FORMAT, MANIFEST, VERSION, Dataset, is_dataset, open_dataset
from gptddp.data.tokenizer import Tokenizer, byte_tokenizer, load_tokenizer, train_bpe
from gptddp.errors import DataError
from gptddp.files import fsync
from gptddp.prepare import listing, output, sources, token_lists
from gptddp.prepare.output import tidy
from gptddp.prepare.progress_bar import Progress
from gptddp.prepare.recipe import (
    DEFAULTS,
    Settings,
    default_vocab_size,
    differences,
    given_tokenizer,
    origin,
)
from gptddp.prepare.shard_writer import ShardWriter
from gptddp.prepare.shuffle import Shuffle

# A row group is the unit that is dealt to lanes: with four a lane, lanes differ by a few percent.
_ROW_GROUPS = 4 * 48
_MAX_ROWS = 1024  # documents of a row group; above, tokenising one is felt
# Merges are settled by frequent pairs: more text than this costs time (5 MB/s a core) and gains
# nothing (Python source, vocabulary 4096: 3.34 bytes a token from 64 MiB, 3.33 from 32).
_TOKENIZER_SAMPLE_BYTES = 32 << 20
_TOKENIZER_FILE = "tokenizer.json"
OUTPUTS = (MANIFEST, _TOKENIZER_FILE, "train", "val")

PathLike = str | os.PathLike[str]


def prepare(
    given: Sequence[PathLike],
    out: PathLike,
    settings: Settings = DEFAULTS,
    progress: Progress | None = None,
) -> Dataset:
    """Make the dataset `out` of the files and folders `given`; raises DataError.

    The same documents and settings give the same bytes in every shard, on any machine. If `out` is
    the dataset of these very files and settings already, nothing is done. Whatever else ends it
    early, `out` is left as it was.
    """
    out = Path(out)
    progress = progress or Progress(None)
    check_apart(given, out)
    _check_new(given)
    definition = given_tokenizer(settings.tokenizer)
    files = listing.find(given, settings.include, settings.exclude, skip=out)
    if not files:
        raise DataError(_no_files(given, settings))
    made_from = origin(given, files, settings, definition)
    if os.path.exists(out / MANIFEST):
        return _existing(out, made_from, progress)
    with write_errors(out), output.claim(out, OUTPUTS, last=MANIFEST) as scratch:
        manifest = _build(files, out, scratch, settings, definition, progress)
        commit(out, scratch, {**made_from, **manifest})
    return open_dataset(out)


# -- the four steps ------------------------------------------------------------------------------


def _build(
    files: Sequence[listing.SourceFile],
    out: Path,
    scratch: Path,
    settings: Settings,
    definition: bytes | None,
    progress: Progress,
) -> dict[str, Any]:
    ids = None  # the tokenizer that has made the tokens, where the sources are such
    if settings.tokens_field is not None:
        ids = byte_tokenizer()
        if definition is not None:
            ids = load_tokenizer(settings.tokenizer)
    with contextlib.closing(Shuffle(scratch / "shuffle", settings.seed)) as shuffle:
        dropped = _read(files, shuffle, settings, ids, progress)
        documents, dropped["duplicate"] = shuffle.finish()
        if documents < 2:
            raise DataError(_too_few(documents, dropped))
        val_documents = min(documents - 1, max(1, round(documents * settings.val_fraction)))
        if definition is None and settings.tokenizer == "bpe":
            progress.start("training the tokenizer")
            sample = _first(islice(shuffle, val_documents, None), _TOKENIZER_SAMPLE_BYTES)
            vocab_size = settings.vocab_size or default_vocab_size(shuffle.bytes)
            definition = train_bpe(sample, vocab_size).encode()
        tokenizer, about = _place_tokenizer(out, definition)
        splits = _write(out, shuffle, documents, val_documents, tokenizer, ids, progress)
    column = {} if ids is None else {"column": pretokenized.COLUMN}
    return {"dropped": dropped, "tokenizer": about, **column, "splits": splits}


def _read(
    files: Sequence[listing.SourceFile],
    shuffle: Shuffle,
    settings: Settings,
    ids: Tokenizer | None,
    progress: Progress,
) -> dict[str, int]:
    """Put all documents into the shuffle; returns what was dropped."""
    dropped = {"empty": 0, "duplicate": 0, "binary_files": 0}
    binary = []
    progress.start(f"reading {len(files)} files", total=sum(file.bytes for file in files))
    for file in files:
        texts: Iterator[bytes] | None
        if ids is None:
            texts = sources.documents(file, settings.text_field)
        else:
            texts = token_lists.documents(file, str(settings.tokens_field), ids)
        if texts is None:
            binary.append(listing.show(file.path))
            texts = iter(())
        left = file.bytes  # compressed files come to their end early
        for text in texts:
            if text.decode().strip() if ids is None else text:
                shuffle.add(text)
            else:
                dropped["empty"] += 1
            step = min(left, len(text))
            left -= step
            progress.advance(step)
        progress.advance(left)
    dropped["binary_files"] = len(binary)
    if binary:
        more = ", ..." if len(binary) > 3 else ""
        progress.note(f"skipped, not UTF-8 text: {len(binary)} ({', '.join(binary[:3])}{more})")
    return dropped


def _place_tokenizer(out: Path, definition: bytes | None) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and what the manifest says of it; a BPE is written to tokenizer.json."""
    about: dict[str, Any] = {"kind": "bytes", "file": None}
    tokenizer = byte_tokenizer()
    if definition is not None:
        path = out / _TOKENIZER_FILE
        path.write_bytes(definition)
        fsync(path)
        tokenizer = load_tokenizer(path)
        about = {"kind": tokenizer.kind, "file": _TOKENIZER_FILE, "bytes": len(definition)}
    about |= {k: getattr(tokenizer, k) for k in ("sha256", "vocab_size", "bos")}
    return tokenizer, about


def _write(
    out: Path,
    shuffle: Iterable[bytes],
    documents: int,
    val_documents: int,
    tokenizer: Tokenizer,
    ids: Tokenizer | None,
    progress: Progress,
) -> dict[str, Any]:
    """Write both splits; returns what the manifest says of them."""
    rows = rows_per_group(documents - val_documents)
    progress.start("writing", total=documents)
    encode = tokenizer.encoder()
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    order = iter(shuffle)
    with (
        ShardWriter(out, "val", rows, ids) as val,
        ShardWriter(out, "train", rows, ids) as train,
    ):
        for text in islice(order, val_documents):
            val.add(text)
            found = encode(text.decode()) if ids is None else pretokenized.ids_of(text, ids)
            counts += np.bincount(found, minlength=len(counts))
            progress.advance(1)
        for text in order:
            train.add(text)
            progress.advance(1)
        entropy = unigram_entropy_nats(counts)
        about = {"tokens": int(counts.sum()), "unigram_entropy_nats": round(entropy, 6)}
        return {"train": train.close(), "val": {**val.close(), **about}}


def rows_per_group(documents: int) -> int:
    """Documents of a row group where the training split has so many."""
    return max(1, min(_MAX_ROWS, documents // _ROW_GROUPS))


def commit(out: Path, scratch: Path, manifest: dict[str, Any]) -> None:
    head = {"format": FORMAT, "version": VERSION, "gptddp": __version__}
    path = scratch / MANIFEST
    text = json.dumps({**head, **manifest}, indent=1)
    text = re.sub(r"\[\s+(\d+),\s+(\d+)\s+\]", r"[\1, \2]", text)  # a row group on a line
    path.write_text(text + "\n", "utf-8")
    fsync(path)
    fsync(out)
    path.rename(out / MANIFEST)
    fsync(out)


def unigram_entropy_nats(counts: np.ndarray) -> float:
    """Entropy of a token drawn by these counts, in nats: the loss of a model that knows no more."""
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def _first(texts: Iterable[bytes], limit_bytes: int) -> Iterator[str]:
    for text in texts:
        if limit_bytes <= 0:
            return
        yield text.decode()
        limit_bytes -= len(text)


def summary(dataset: Dataset) -> str:
    """What has been made, in a few lines for people, and what to type next."""
    m = dataset.manifest
    train, val, lost = m["splits"]["train"], m["splits"]["val"], m["dropped"]
    bytes_a_token = val["text_bytes"] / val["tokens"]
    bits_a_byte = val["unigram_entropy_nats"] / math.log(2) / bytes_a_token
    return f"""\
documents   {train["documents"]:,} train, {val["documents"]:,} validation
dropped     {lost["empty"]:,} empty, {lost["duplicate"]:,} copies, {lost["binary_files"]:,} binary
text        {train["text_bytes"] / 1e6:,.1f} MB train, {val["text_bytes"] / 1e6:,.1f} MB validation
tokenizer   {m["tokenizer"]["kind"]}, vocabulary {m["tokenizer"]["vocab_size"]:,}, \
{bytes_a_token:.2f} bytes a token
entropy     {val["unigram_entropy_nats"]:.3f} nats a token, {bits_a_byte:.3f} bits a byte: \
the loss of a model that knows only how frequent tokens are
dataset     {dataset.dir}
next        gptddp train --data {dataset.dir} --run-dir RUN"""


# -- what was made before, and what cannot work --------------------------------------------------


def check_apart(given: Sequence[PathLike], out: Path) -> None:
    for source in given:
        if Path(os.path.realpath(source)).is_relative_to(os.path.realpath(out)):
            raise DataError(
                f"the source {listing.show(os.fspath(source))} lies in the output {out}: "
                "choose an --out that holds no source"
            )


def _check_new(given: Sequence[PathLike]) -> None:
    """Refuse a dataset as a source: its manifest would be taken for a text, too."""
    for source in given:
        if is_dataset(Path(source)):
            shown = listing.show(os.fspath(source))
            raise DataError(
                f"the source {shown} is a dataset already, for `gptddp train --data`; to prepare "
                f"its documents again, give {shown}/train and {shown}/val"
            )


def _existing(out: Path, made_from: dict[str, Any], progress: Progress) -> Dataset:
    """The dataset that is there already, if it is the one that was asked for."""
    dataset = open_dataset(out)
    if changed := differences(dataset.manifest, made_from):
        raise DataError(
            f"{out} already holds a dataset made otherwise: {'; '.join(changed)}: "
            f"choose another --out, or remove {out} first"
        )
    tidy(out)
    progress.note(f"{out} is already prepared from these sources with these settings")
    return dataset


def _no_files(given: Sequence[PathLike], settings: Settings) -> str:
    names = ", ".join(listing.show(os.fspath(source)) for source in given)
    why = "give text, .jsonl or .parquet files, or a folder of them"
    if settings.include or settings.exclude:
        why = "check --include and --exclude, which are compared with names"
    return f"{names}: no files to read; {why}"


def _too_few(documents: int, dropped: dict[str, int]) -> str:
    lost = ", ".join(f"{n} {what.replace('_', ' ')}" for what, n in dropped.items() if n)
    return (
        f"the sources hold {documents} documents{f' (dropped: {lost})' if lost else ''}: at least "
        "2 different ones are needed, one of them for validation; give more text (a text file "
        f"is cut into documents of {sources.DOCUMENT_BYTES >> 10} KiB, a line of JSONL is one)"
    )


@contextlib.contextmanager
def write_errors(out: Path) -> Iterator[None]:
    """Turn what the file system says while the dataset is written into one message."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise DataError(
                f"no space left for {out} ({error.strerror}): preparing needs about one and a half "
                "times the size of the text there; free some, or choose another --out. "
                "Nothing was left behind"
            ) from error
        raise DataError(
            f"cannot write to {out}: {error.strerror or error}; choose another --out"
        ) from error
