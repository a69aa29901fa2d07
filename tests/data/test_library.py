"""The version of the tokenizing library is part of a run's position and of cache keys."""

import json
import types
from pathlib import Path

import pytest
from support.loaders import Bytes, corpus, open_loader
from support.prepared import BYTES

from gptddp.data.blocks import Source
from gptddp.data.lanes import Block
from gptddp.data.tokenizer import byte_tokenizer, load_tokenizer, train_bpe
from gptddp.errors import DataError
from gptddp.prepare.build import prepare


def test_the_library_in_use_is_named(tmp_path: Path) -> None:
    """The library is tiktoken, or `tokenizers` if tiktoken cannot encode, or none for bytes."""
    path = tmp_path / "tokenizer.json"
    path.write_text(train_bpe(["a text of a few words, a text"], 300))
    assert str(load_tokenizer(path).library).startswith("tiktoken ")
    definition = json.loads(path.read_text())
    definition["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "MergedWithNext"
    path.write_text(json.dumps(definition))
    assert str(load_tokenizer(path).library).startswith("tokenizers ")
    assert byte_tokenizer().library is None


def test_a_run_continues_only_with_its_own_version(monkeypatch) -> None:
    """Another version is refused; the message has both versions."""
    monkeypatch.setattr(Bytes, "library", "tiktoken 0.9.0")
    dataset = corpus()
    with open_loader(dataset) as loader:
        state = json.loads(json.dumps(loader.state(loader.next().cursors)))
    assert state["library"] == "tiktoken 0.9.0"
    with open_loader(dataset, state=state) as loader:
        loader.next()
    for other in ("tiktoken 0.10.0", "tokenizers 0.9.0"):
        monkeypatch.setattr(Bytes, "library", other)
        with pytest.raises(DataError, match=f"library: tiktoken 0.9.0 -> {other}; use the data"):
            open_loader(dataset, state=state)


def test_another_version_does_not_use_the_rows_in_the_cache(books, tmp_path) -> None:
    """The cache key changes with the library and its version, and only with them."""
    dataset = prepare([books], tmp_path / "data", BYTES)
    found = []
    for library in (None, "tiktoken 0.9.0", "tiktoken 0.10.0", "tiktoken 0.10.0"):
        tokenizer = byte_tokenizer()
        tokenizer.library = library
        source = Source(dataset, "train", dataset.row_groups("train"), tokenizer, 16)
        source.cache = types.SimpleNamespace(get=lambda *_: None)  # type: ignore[assignment]
        found.append(source.cached(Block(0, 0, 1, 1))[1])
    assert len(set(found)) == 3 and found[2] == found[3]


def test_token_ids_have_no_library(books, tmp_path) -> None:
    """A dataset of token ids records no library, because every version reads it alike."""
    dataset = prepare([books], tmp_path / "data", BYTES)
    dataset.manifest["column"] = "tokens"
    tokenizer = byte_tokenizer()
    tokenizer.library = "tiktoken 0.9.0"
    assert Source(dataset, "train", [], tokenizer, 16).library is None
