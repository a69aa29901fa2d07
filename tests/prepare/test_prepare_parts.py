"""Huge documents are cut into marked parts of one split; no token is lost, and each counts once."""

import contextlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.prepared import BYTES, texts

from gptddp.data import pretokenized
from gptddp.data.dataset import SPLITS, Dataset, Split
from gptddp.data.loader import Loader
from gptddp.data.tokenizer import byte_tokenizer
from gptddp.prepare import reading
from gptddp.prepare.build import prepare
from gptddp.prepare.commands import summary
from gptddp.prepare.recipe import Settings

LIMIT = 1000
HUGE = "".join(f"line {n} of a huge document\n" for n in range(2_500))
SMALL = [f"document {n}, " * (n % 30 + 1) for n in range(60)]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch) -> None:
    monkeypatch.setattr(reading, "PART_BYTES", LIMIT)
    monkeypatch.setattr(reading, "PART_IDS", LIMIT)


def source(path: Path, *documents: str) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def marked(dataset: Dataset, split: Split) -> list[tuple[str, bool]]:
    groups = dataset.row_groups(split)
    return [row for g in groups for row in zip(dataset.read(g), dataset.goes_on(g), strict=True)]


def check_parts(dataset: Dataset) -> str:
    """Check that the parts of HUGE are complete, marked and in one split; return the split."""
    rows = {split: [row for row in marked(dataset, split) if row[0] in HUGE] for split in SPLITS}
    (split,) = (split for split in SPLITS if rows[split])
    found = sorted(rows[split], key=lambda row: HUGE.index(row[0]))
    assert "".join(text for text, _ in found) == HUGE
    assert [goes_on for _, goes_on in found] == [True] * (len(found) - 1) + [False]
    assert len(rows[split]) == len(found)
    assert not any(mark for s in SPLITS for text, mark in marked(dataset, s) if text in SMALL)
    return split


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("a line\n" * 1000, b"\n"),
        ("words of one line " * 500, None),
        ("字" * 2000, None),
        ("🙂é" * 2000, None),
        ("x" * 5000, None),
        ("\n" + "x" * 5000, None),
        ("x" * LIMIT, None),
    ],
)
def test_a_text_is_cut_at_good_places(text, ends):
    """It is cut after a line end, before a space, or else between characters; no part is short."""
    cut = reading.cut(text.encode())
    assert b"".join(cut) == text.encode() and all(len(part) <= LIMIT for part in cut)
    assert all(len(part) >= LIMIT // 2 for part in cut[:-1])
    assert "".join(part.decode() for part in cut) == text  # no character is cut
    if ends:
        assert all(part.endswith(ends) for part in cut)
    elif " " in text:
        assert all(part.startswith(b" ") for part in cut[1:])
    assert len(cut) == 1 or len(text.encode()) > LIMIT


def test_ids_are_cut_between_ids():
    """A list of ids is cut into equal numbers of ids, whatever their bytes."""
    tokenizer = byte_tokenizer()
    ids = np.arange(2500, dtype="<u2") % 256
    cut = [pretokenized.ids_of(part, tokenizer) for part in reading.cut(ids.tobytes(), tokenizer)]
    assert [len(part) for part in cut] == [LIMIT, LIMIT, 500]
    assert np.array_equal(np.concatenate(cut), ids)


@pytest.mark.parametrize("fraction", [0.01, 0.5])
def test_parts_are_rows_and_whole_documents_are_counted(tmp_path, fraction):
    """All parts of a document are in one split; copies are found, and each document counts once."""
    given = source(tmp_path / "in.jsonl", *SMALL, HUGE, HUGE, SMALL[7])
    sides = set()
    for seed in range(4):
        settings = Settings(tokenizer="bytes", seed=seed, val_fraction=fraction)
        dataset = prepare([given], tmp_path / f"{seed}", settings)
        manifest = dataset.manifest
        sides.add(check_parts(dataset))
        n = {split: manifest["splits"][split]["documents"] for split in SPLITS}
        assert sum(n.values()) == 61
        assert n["val"] == pytest.approx(fraction * 61, abs=2)
        assert manifest["dropped"]["duplicate"] == 2
        rows = len(texts(dataset, "train")) + len(texts(dataset, "val"))
        cut = {"documents": 1, "parts": rows - 60}
        assert manifest["cut"] == cut and cut["parts"] > 60 and manifest["version"] == 3
        assert f"1 huge documents, into {cut['parts']} parts" in summary(
            dataset.dir, dataset.manifest
        )
    assert sides == {"train", "val"} or fraction < 0.5


def test_parts_of_a_validation_source_are_not_trained_on(tmp_path):
    """A huge document of --val is in the validation split alone, also if another source has it."""
    given, val = source(tmp_path / "a.jsonl", *SMALL, HUGE), source(tmp_path / "v.jsonl", HUGE)
    dataset = prepare([given], tmp_path / "out", BYTES, val=[val])
    assert check_parts(dataset) == "val"
    assert dataset.manifest["splits"]["val"]["documents"] == 1


def test_without_huge_documents_there_are_no_marks(tmp_path):
    """Shards have no column of marks, and the manifest no field; each mark is read as False."""
    dataset = prepare([source(tmp_path / "in.jsonl", *SMALL)], tmp_path / "out", BYTES)
    assert "cut" not in dataset.manifest
    group = dataset.row_groups("train")[0]
    assert pq.read_schema(dataset.dir / group.path).names == ["text"]
    assert dataset.goes_on(group) == [False] * group.rows


@pytest.mark.parametrize("pack_as", ["best-fit", "concat"])
@pytest.mark.parametrize("column", ["text", "tokens"])
def test_an_epoch_has_every_token_once_and_lanes_are_balanced(tmp_path, pack_as, column):
    """This holds for token ids too; each document ends once, and lanes have nearly equal rows."""
    settings = BYTES
    given = source(tmp_path / "in.jsonl", *SMALL, HUGE)
    if column == "tokens":
        given = tmp_path / "in.parquet"
        ids = [list(text.encode()) for text in [*SMALL, HUGE]]
        pq.write_table(pa.table({"ids": pa.array(ids, pa.list_(pa.uint16()))}), given)
        settings = Settings(tokenizer="bytes", tokens_field="ids")
    dataset = prepare([given], tmp_path / "out", settings)
    tokenizer, lanes = dataset.tokenizer(), 4
    encode = tokenizer.encoder() if column == "text" else list
    expected: Counter = Counter()
    for text, goes_on in marked(dataset, "train"):
        tokens = [256, *encode(text), *[256] * (not goes_on)]
        expected.update(zip(tokens, tokens[1:], strict=False))
    found: Counter = Counter()
    rows = np.zeros(lanes, int)
    first = np.ones(lanes, bool)
    settings_of = dict(lanes=lanes, batch=lanes, seq_len=64, seed=3, pack=pack_as)
    with contextlib.closing(Loader(dataset, **settings_of)) as loader:
        while first.any():
            batch = loader.next()
            first = batch.origin[:, 1] == 0  # rows of the first epoch
            real = batch.valid & first[:, None]
            pairs = zip(
                batch.tokens[:, :-1][real].tolist(), batch.tokens[:, 1:][real].tolist(), strict=True
            )
            found.update(pairs)
            rows += first
    assert found == expected
    assert rows.max() < 1.02 * rows.min()
    train = dataset.manifest["splits"]["train"]["documents"]
    assert sum(n for (_, target), n in found.items() if target == 256) == train
