"""Worlds that are killed at random moments, and change their size, have the bits of one process.

Each world is the container's entrypoint with real torchrun agents and gloo, killed as a whole: a
life continues from the newest checkpoint.
"""

import json
import os
import random
import secrets
import shutil
import time
from pathlib import Path

import pytest
from support import forked
from support.prepared import flip
from support.same_bits import check_same_bits
from support.toy import SMALL
from support.waiting import PATIENCE_S, until

from gptddp import train
from gptddp.data import blocks, lanes
from gptddp.data.dataset import open_dataset
from gptddp.data.loader import from_text
from gptddp.prepare.build import prepare
from gptddp.prepare.recipe import Settings
from gptddp.run.history import history, read_ledger

STEPS = 120  # two epochs of every lane
# Every process of a life gives up an unreadable row group at once.
GIVE_UP = "from gptddp.data import blocks; blocks.RETRY_S = (0.001,); "


@pytest.fixture(scope="module")
def books(tmp_path_factory) -> Path:
    """A dataset of 100 documents of random words."""
    folder, rng = tmp_path_factory.mktemp("books"), random.Random(1)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(1, 9))) for _ in range(300)]
    texts = [f"{i}: {' '.join(rng.choices(words, k=rng.randint(1, 40)))}" for i in range(100)]
    source = folder / "source.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return prepare([source], folder / "data", Settings(tokenizer="bytes")).dir


def command(data: Path, run: Path, *flags: str) -> list[str]:
    places = ["--data", str(data), "--run-dir", str(run), "--steps", str(STEPS)]
    return [*SMALL, *places, "--eval-every", "1000", "--dropout", "0.1", *flags]


@pytest.fixture(scope="module")
def undisturbed(books, tmp_path_factory) -> Path:
    """The run of one process; every lane reaches its third epoch."""
    run = tmp_path_factory.mktemp("undisturbed")
    forked.train(1, *command(books, run))
    (manifest,) = run.glob(f"checkpoints/step-{STEPS:012}.*/manifest.json")
    lanes = json.loads(manifest.read_text())["meta"]["data"]["lanes"]
    assert min(epoch for epoch, _, _ in from_text(lanes)) >= 2
    return run


class World:
    """One life: a pod of some workers."""

    def __init__(self, args: list[str], workers: int, log: Path, code: str = "") -> None:
        self.log = log
        env = {"PET_NPROC_PER_NODE": str(workers), "OMP_NUM_THREADS": "1"}
        self.pod = forked.fork(code + forked.LAUNCH, *args, env=os.environ | env, stderr=log)

    def __enter__(self) -> "World":
        return self

    def __exit__(self, *_: object) -> None:
        self.pod.kill()  # the kernel ends the workers with it
        self.pod.wait()

    def until(self, condition) -> None:
        until(condition, why=self.log.read_text)


def test_random_kills_and_world_sizes_change_no_bit(books, undisturbed, tmp_path):
    """Lives of 2, 5, 7 and 1 ranks have every number and bit of one process over two epochs."""
    sizes = (2, 5, 7, 1)
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    rng, run, done = random.Random(seed), tmp_path / "run", 0
    args = command(books, run, "--checkpoint-every", "0.3")
    for life, workers in enumerate(sizes, 1):
        with World(args, workers, tmp_path / f"{life}.log") as world:
            if life == len(sizes):
                assert world.pod.wait(PATIENCE_S) == 0, world.log.read_text()
                break
            latest = STEPS * life // len(sizes)
            target = rng.randint(min(done + 5, latest), latest)
            world.until(lambda target=target: last_step(run) >= target)
            time.sleep(rng.uniform(0, 0.1))
        done = last_step(run)
        assert done < STEPS, "the run ended before the kill"
    check_same_bits(run, undisturbed)
    starts = [event for event in read_ledger(run) if event["event"] == "start"]
    assert [start["world_size"] for start in starts][-1] == sizes[-1]
    assert {start["world_size"] for start in starts} == set(sizes)


def test_a_quarantine_decision_survives_a_kill(books, tmp_path, monkeypatch, train_here):
    """After SIGKILL between decision and checkpoint, each life quarantines at the same step.

    The file is repaired, and the world size differs; the bits are those of one process.
    """
    dataset = open_dataset(shutil.copytree(books, tmp_path / "data"))
    sizes = [group.tokens for group in dataset.row_groups("train")]
    number = lanes.deal(sizes, 8, 1337)[5][-1].group
    flip(dataset, number)
    alone, run = tmp_path / "alone", tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(blocks, "RETRY_S", (0.001,))
        assert train.main(command(dataset.dir, alone, "--on-bad", "quarantine")) == 0
    (expected,) = decisions(alone)
    assert expected[0] > 0

    args = command(dataset.dir, run, "--on-bad", "quarantine", "--checkpoint-every", "3600")
    for life, workers in enumerate((3, 2, 1), 1):
        with World(args, workers, tmp_path / f"{life}.log", code=GIVE_UP) as world:
            if workers > 1:
                world.until(lambda life=life: run.exists() and len(decisions(run)) == life)
                time.sleep(random.uniform(0, 0.2))
            else:
                assert world.pod.wait(PATIENCE_S) == 0, world.log.read_text()
        shutil.copytree(books, dataset.dir, dirs_exist_ok=True)
    assert decisions(run) == [expected] * 3
    check_same_bits(run, alone)


def decisions(run: Path) -> list[tuple[int, list[int]]]:
    events = [event for event in read_ledger(run) if event["event"] == "quarantine"]
    return [(event["step"], event["row_groups"]) for event in events]


def last_step(run: Path) -> int:
    return max((line["step"] for line in history(run)), default=0) if run.exists() else 0
