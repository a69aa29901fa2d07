"""The library that makes the tokens: its version belongs to a run's position, and to the cache."""

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


def test_it_is_the_one_in_use(tmp_path: Path) -> None:
    """tiktoken, `tokenizers` where that cannot encode, and none for bytes."""
    path = tmp_path / "tokenizer.json"
    path.write_text(train_bpe(["a text of a few words, a text"], 300))
    assert str(load_tokenizer(path).library).startswith("tiktoken ")
    definition = json.loads(path.read_text())
    definition["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "MergedWithNext"
    path.write_text(json.dumps(definition))
    assert str(load_tokenizer(path).library).startswith("tokenizers ")
    assert byte_tokenizer().library is None


def test_a_run_goes_on_with_its_own_version_alone(monkeypatch) -> None:
    """Another one is refused with both."""
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
    """Nor a library where there was none; without a change the identity stays."""
    dataset = prepare([books], tmp_path / "data", BYTES)
    found = []
    for library in (None, "tiktoken 0.9.0", "tiktoken 0.10.0", "tiktoken 0.10.0"):
        tokenizer = byte_tokenizer()
        tokenizer.library = library
        source = Source(dataset, "train", dataset.row_groups("train"), tokenizer, 16)
        source.cache = types.SimpleNamespace(get=lambda *_: None)  # type: ignore[assignment]
        found.append(source.cached(Block(0, 0, 1, 1))[1])
    assert len(set(found)) == 3 and found[2] == found[3]


def test_of_token_ids_no_library_is_asked(books, tmp_path) -> None:
    """They are the same with any version."""
    dataset = prepare([books], tmp_path / "data", BYTES)
    dataset.manifest["column"] = "tokens"
    tokenizer = byte_tokenizer()
    tokenizer.library = "tiktoken 0.9.0"
    assert Source(dataset, "train", [], tokenizer, 16).library is None
