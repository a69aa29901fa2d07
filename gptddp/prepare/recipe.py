"""The settings and source files of a dataset, and their differences from another dataset's."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gptddp.data.tokenizer import MIN_VOCAB, load_tokenizer
from gptddp.data.tokenizer_json import BOS
from gptddp.errors import DataError
from gptddp.prepare.listing import PathLike, SourceFile
from gptddp.prepare.walk import show


@dataclass(frozen=True)
class Settings:
    """Settings that, with the sources, determine the dataset. Raises DataError for wrong values."""

    text_field: str = "text"
    tokens_field: str | None = None  # the documents are lists of token ids in this column
    tokenizer: str = "bpe"  # "bpe": train one; "bytes"; or the path of a tokenizer.json
    vocab_size: int | None = None  # None: see `default_vocab_size`
    val_fraction: float = 0.01
    seed: int = 1337
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_bad: int = 0  # skip and list up to this many bad records

    def __post_init__(self) -> None:
        if not 0 < self.val_fraction <= 0.5:
            raise DataError(
                f"--val-fraction is {self.val_fraction}: use more than 0, and at most 0.5, so that "
                "most of the text is for training; to give validation data separately, use --val"
            )
        if self.max_bad < 0:
            raise DataError(f"--max-bad is {self.max_bad}: use a number from 0")
        if not 0 <= self.seed < 2**64:
            raise DataError(f"--seed is {self.seed}: use a value from 0 to 2**64 - 1")
        if self.tokens_field is not None and self.tokenizer == "bpe":
            raise DataError(
                f"--tokens-field {self.tokens_field} reads ready-made token ids: give the "
                "tokenizer.json that made them with --tokenizer"
            )
        if self.vocab_size is not None:
            if self.tokenizer != "bpe":
                raise DataError("--vocab-size is for training a tokenizer: omit it here")
            if not MIN_VOCAB <= self.vocab_size <= 2**20:
                raise DataError(
                    f"--vocab-size is {self.vocab_size}: use {MIN_VOCAB} (256 bytes and "
                    f"{BOS}) to {2**20}"
                )


DEFAULTS = Settings()


def default_vocab_size(text_bytes: int) -> int:
    """2048 below 16 MiB, so that tokens are frequent enough; 32768 from 1 GiB; 4096 in between.

    Less than 1 GiB of text suits a tiny model: a large softmax would be most of its work. More
    suits a GPT-2, whose original vocabulary is 50257; 32768 ids fit in 16 bits.
    """
    if text_bytes < 16 << 20:
        return 2048
    return 4096 if text_bytes < 1 << 30 else 32768


def given_tokenizer(tokenizer: str) -> bytes | None:
    """The content of the given tokenizer.json; None for "bpe" and "bytes".

    Raises DataError if it cannot be used.
    """
    if tokenizer in ("bpe", "bytes"):
        return None
    if not os.path.isfile(tokenizer):
        raise DataError(f"--tokenizer {tokenizer}: use bpe, bytes, or a tokenizer.json that exists")
    load_tokenizer(tokenizer)
    return Path(tokenizer).read_bytes()


def made_from(
    given: Sequence[PathLike],
    files: Sequence[SourceFile],
    settings: Settings,
    definition: bytes | None,
) -> dict[str, Any]:
    """The manifest's entries for settings and sources; see `differences`."""
    said = asdict(settings)
    if definition is not None:
        said["tokenizer"] = "sha256:" + hashlib.sha256(definition).hexdigest()
    identities = "\n".join(sorted(file.identity for file in files))
    sources = {
        "given": [show(os.fspath(source)) for source in given],
        "files": len(files),
        "val_files": sum(file.val for file in files),
        "bytes": sum(file.bytes for file in files),
        "listing_sha256": hashlib.sha256(identities.encode()).hexdigest(),
    }
    return {"settings": said, "sources": sources}


def differences(manifest: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The differences between a manifest and `made_from` of this call; [] if there are none.

    The limit of bad records is compared only if the dataset has more bad records.
    """
    same = {"max_bad"} if manifest["bad_records"] <= now["settings"]["max_bad"] else set()
    old = manifest["settings"]
    words = [
        f"--{name.replace('_', '-')} {old.get(name)} -> {value}"
        for name, value in json.loads(json.dumps(now["settings"])).items()
        if old.get(name) != value and name not in same
    ]
    old, new = manifest["sources"], now["sources"]
    if old["listing_sha256"] != new["listing_sha256"]:
        counts = (f"{name} {old[name]} -> {new[name]}" for name in ("files", "val_files", "bytes"))
        words.append(f"the source files ({', '.join(counts)}; names, sizes, times are compared)")
    return words
