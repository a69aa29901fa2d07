"""Settings, states and data that the loader refuses."""

import types

import numpy as np
import pytest
from support.loaders import Dataset, corpus, open_loader

from gptddp.data.loader import Loader, eval_rows
from gptddp.errors import ConfigError, DataError


def test_no_text_at_all_is_refused():
    """A dataset without a token raises DataError, whatever its manifest says."""
    with pytest.raises(DataError, match="no text in its train split"):
        Loader(Dataset([["", None]]), lanes=2, batch=2, seq_len=8, seed=1)
    lying = Dataset([["", None]])
    lying.row_groups = lambda split: [
        types.SimpleNamespace(path="train/00000.parquet", index=0, rows=2, tokens=99)
    ]
    with open_loader(lying) as loader, pytest.raises(DataError, match="lane 0 has no text"):
        loader.next()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(seed=8), "seed: 7 -> 8"),
        (dict(seq_len=32), "seq_len: 16 -> 32"),
        (dict(lanes=4), "lanes: 8 -> 4"),
        (dict(batch=8), "batch: 16 -> 8"),
        (dict(dataset=corpus(seed=2)), "dataset: "),
        (dict(older="older"), "pack: older -> bfd-4"),
        (dict(pack="concat"), "pack: bfd-4 -> concat-3"),
        (dict(version=99), "version: 99 -> 2"),
        (dict(tokenizer="other"), "tokenizer: other -> bbbb"),
    ],
)
def test_a_state_of_other_data_or_settings_is_refused(changes, expected):
    """Everything that determines the rows is compared; the message has the differences."""
    dataset = corpus()
    with open_loader(dataset) as loader:
        state = loader.state(loader.next().cursors)
    saved = {k: changes.pop(k) for k in ("older", "version", "tokenizer") if k in changes}
    saved = {"pack" if k == "older" else k: v for k, v in saved.items()}
    with pytest.raises(DataError, match=expected):
        open_loader(changes.pop("dataset", dataset), state=state | saved, **changes)


def test_an_empty_state_is_not_a_fresh_start():
    """An empty state is refused; the message has every field."""
    with pytest.raises(DataError, match="version: None -> 2.*lanes: 0 -> 8"):
        open_loader(corpus(), state={})


def test_an_impossible_position_is_refused():
    """Cursors outside the lane's blocks or rows are an error."""
    dataset = corpus()
    with open_loader(dataset) as loader:
        state = loader.state(loader.next().cursors)
    with pytest.raises(DataError, match="lane 3 is row 0 of block 99"):
        open_loader(dataset, state=state | {"lanes": "0.0.0 " * 3 + "0.99.0 " * 5})
    state |= {"lanes": "0.0.9999 " * 8}
    with open_loader(dataset, state=state) as loader, pytest.raises(DataError, match="row 9999"):
        loader.next()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(batch=12), "batch 12 is not divisible by lanes 8"),
        (dict(lanes=0), "lanes is 0"),
    ],
)
def test_unsuitable_numbers_are_refused(changes, message):
    """Settings that cannot work raise ConfigError with the fix."""
    with pytest.raises(ConfigError, match=message):
        open_loader(corpus(), **changes)


def test_an_error_of_the_tokenizer_reaches_the_caller():
    """next() raises any error of a thread."""
    dataset = corpus()
    dataset.tokenizer = lambda: types.SimpleNamespace(
        sha256="", bos=0, dtype=np.dtype(np.uint16), encoder=lambda: 1 / 0, library=None
    )
    with open_loader(dataset) as loader, pytest.raises(ZeroDivisionError):
        loader.next()


def test_no_validation_text_is_refused():
    """An empty validation split raises DataError."""
    for val in ([], [["", None]]):
        with pytest.raises(DataError, match="no text in its val split"):
            eval_rows(Dataset([["text"]], val), 16, 100)
