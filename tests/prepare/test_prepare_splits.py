"""`gptddp prepare`: the validation split; no text is in both splits."""

import json
import random
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.prepared import BYTES, all_texts, refused, run, texts

from gptddp.data.dataset import Dataset, open_dataset
from gptddp.prepare.build import prepare
from gptddp.prepare.file_names import split_of
from gptddp.prepare.recipe import Settings

IDENTITY = "2d2b3b6b13d61005c418f743f7d550d5e1d210216bb58d8d9f6e1ded2222a6c3"


def parquet(path: Path, *documents: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"text": documents}), path)


def book(path: Path, pieces: int, first: str = "") -> Path:
    """A text file of this many pieces; each line has the file's name."""
    lines = (f"{path.stem} {n}\n".ljust(64, ".") for n in range(pieces * 1024 - 40))
    path.write_text(first + "".join(lines))
    return path


def sides(dataset: Dataset, name: str) -> set[str]:
    """The splits that have a line of the book with this name."""
    return {
        split
        for split in ("train", "val")
        if any(f"\n{name} " in f"\n{text}" for text in texts(dataset, split))
    }


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train-00000-of-00002.parquet", "train"),
        ("data/validation-00000-of-00001.parquet", "val"),
        ("x-test-00000-of-00001.parquet", "test"),
        ("wiki.valid.raw", "val"),
        ("stories-V2-train.txt", "train"),
        ("train3.jsonl.zst", "train"),
        ("Test/0.json", "test"),
        ("train/test.jsonl", "train"),
        ("dev.jsonl", "val"),
        ("test.py", None),
        ("tests/data.jsonl", None),
        ("val/test.py", None),
        ("training of dogs.txt", None),
        ("developers.jsonl", None),
        ("0.parquet", None),
    ],
)
def test_a_usual_name_gives_the_split(name: str, split: str | None) -> None:
    """A folder, or a file's first or last word, names the split; source code has none."""
    assert split_of(name) == split


@pytest.mark.parametrize("in_folders", [False, True])
def test_splits_of_a_folder_are_kept(tmp_path: Path, in_folders: bool) -> None:
    """Files named train and validation become these splits; test files are skipped with a note."""
    name = "{}/{}.parquet" if in_folders else "data/{}-0000{}-of-00002.parquet"
    for split in ("train", "validation", "test"):
        for n in range(2):
            parquet(tmp_path / "hub" / name.format(split, n), *(f"{split} {n}.{i}" for i in "abc"))
    result = run(tmp_path / "hub", "--out", tmp_path / "out", "--tokenizer", "bytes")
    assert result.exit_code == 0, result.output
    dataset = open_dataset(tmp_path / "out")
    assert {text.split()[0] for text in texts(dataset, "train")} == {"train"}
    assert {text.split()[0] for text in texts(dataset, "val")} == {"validation"}
    assert len(all_texts(dataset)) == 12
    assert "skipped, a test split: 2 (" in result.stderr and "2 a test split" in result.stdout


def test_a_test_file_without_train_files_is_training_text(books: Path, tmp_path: Path) -> None:
    """Without files named train, `test.txt` is training text. Files given by name are no splits."""
    (books / "test.txt").write_text("a text about tests")
    (books / "more" / "train.py").write_text("source code")
    assert len(all_texts(prepare([books], tmp_path / "out", BYTES))) == 42
    for split in ("train", "validation"):
        parquet(tmp_path / f"{split}-0.parquet", f"{split} 1", f"{split} 2")
    given = sorted(tmp_path.glob("*.parquet"))
    dataset = prepare(given, tmp_path / "given", BYTES)
    assert len(texts(dataset, "train")) == 3  # the fourth is validation, as of any texts


def test_val_is_a_separate_source(books: Path, tmp_path: Path) -> None:
    """The documents of --val are the validation split, also if a training source has them too."""
    val = tmp_path / "val.jsonl"
    same = (books / "0.txt").read_text()
    val.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one", "two", same)))
    dataset = prepare([books], tmp_path / "out", BYTES, val=[val])
    assert sorted(texts(dataset, "val")) == sorted(["one", "two", same])
    assert len(texts(dataset, "train")) == 39 and same not in texts(dataset, "train")
    assert dataset.manifest["dropped"]["duplicate"] == 1
    again = run(books, "--tokenizer", "bytes", "--out", tmp_path / "out")
    refused(again, "already holds a dataset with other settings", "val_files 1 -> 0")


def test_val_may_be_inside_a_source(books: Path, tmp_path: Path) -> None:
    """A file or folder as --val is not trained on, and replaces the split of the other source."""
    dataset = prepare([books], tmp_path / "file", BYTES, val=[books / "3.txt"])
    assert texts(dataset, "val") == [(books / "3.txt").read_text()]
    assert len(texts(dataset, "train")) == 39
    dataset = prepare([books], tmp_path / "folder", BYTES, val=[books / "more"])
    assert len(texts(dataset, "val")) == 26 and len(texts(dataset, "train")) == 14
    for split in ("train", "dev", "test"):
        parquet(tmp_path / "hub" / f"{split}.parquet", f"{split} 1", f"{split} 2")
    hub = tmp_path / "hub"
    dataset = prepare([hub], tmp_path / "other", BYTES, val=[books / "0.txt"])
    assert sorted(texts(dataset, "train")) == ["train 1", "train 2"]
    assert texts(dataset, "val") == [(books / "0.txt").read_text()]


def test_val_without_documents_is_refused(books: Path, tmp_path: Path) -> None:
    """Neither split may be empty."""
    (tmp_path / "empty.txt").write_text(" \n")
    out = tmp_path / "out"
    result = run(books, "--val", tmp_path / "empty.txt", "--out", out)
    refused(result, "the validation sources hold no document", "--val")
    shutil.copytree(books, tmp_path / "copy")
    result = run(books, "--val", tmp_path / "copy", "--out", out)
    refused(result, "no document remains for training", "40 duplicate")
    refused(run(books, "--val", tmp_path / "absent", "--out", out), "absent: No such file")
    assert not out.exists()


@pytest.mark.parametrize("seed", range(4))
def test_the_pieces_of_a_file_are_in_one_split(tmp_path: Path, seed: int) -> None:
    """For any sizes and fraction, each long file is in one split as a whole."""
    random.seed(seed)
    folder = tmp_path / "long"
    folder.mkdir()
    names = [f"b{n}" for n in range(random.randint(2, 9))]
    for name in names:
        book(folder / f"{name}.txt", random.randint(1, 5))
    fraction = random.choice([0.01, 0.1, 0.5])
    settings = Settings(tokenizer="bytes", val_fraction=fraction)
    dataset = prepare([folder], tmp_path / "out", settings)
    found = [sides(dataset, name) for name in names]
    assert all(len(side) == 1 for side in found) and {"train"} in found and {"val"} in found


def test_files_that_share_a_piece_are_in_one_split(tmp_path: Path) -> None:
    """Otherwise the text that two versions of a file share would be in both splits."""
    folder = tmp_path / "long"
    folder.mkdir()
    shared = "".join(f"shared {n}\n" for n in range(20_000))
    for n in range(8):
        book(folder / f"other{n}.txt", 2)
    for seed in range(5):
        book(folder / "old.txt", 1, shared)
        book(folder / "new.txt", 2, shared)
        dataset = prepare([folder], tmp_path / f"{seed}", Settings(tokenizer="bytes", seed=seed))
        assert len(sides(dataset, "old") | sides(dataset, "new") | sides(dataset, "shared")) == 1


def test_one_file_is_cut_at_its_end(tmp_path: Path) -> None:
    """The end of a single file is the validation split, and the output says so."""
    book(tmp_path / "only.txt", 40)
    args = ["--tokenizer", "bytes", "--val-fraction", "0.1", "--out", tmp_path / "out"]
    result = run(tmp_path / "only.txt", *args)
    assert "the last 4 of its 40 pieces are the validation split" in result.stderr
    whole, val = (tmp_path / "only.txt").read_text(), texts(open_dataset(tmp_path / "out"), "val")
    assert len(val) == 4 and whole.endswith("".join(sorted(val, key=whole.index)))


def test_a_fraction_far_from_the_requested_one_is_reported(tmp_path: Path) -> None:
    """With two long books, one of them is the validation split: far more than one percent."""
    (tmp_path / "two").mkdir()
    for name, pieces in (("a", 20), ("b", 30)):
        book(tmp_path / "two" / f"{name}.txt", pieces)
    result = run(tmp_path / "two", "--tokenizer", "bytes", "--out", tmp_path / "out")
    assert "validation has 20 of 50 documents instead of 1" in result.stderr
    assert sides(open_dataset(tmp_path / "out"), "a") == {"val"}


def test_the_split_of_whole_documents_never_changes(books: Path, tmp_path: Path) -> None:
    """If no file is cut, the split and the identity of the data stay the same."""
    settings = Settings(tokenizer="bytes", val_fraction=0.2, seed=7)
    dataset = prepare([books], tmp_path / "out", settings)
    assert dataset.sha256 == IDENTITY
