"""Training speed on CPUs: ours compared with PyTorch's defaults, and the overhead of the loop.

    python benchmarks/trainer.py [--rounds 3]

Two processes train the model `tiny` with a vocabulary of 4096 on random text, a step of 48 rows of
256 tokens. The three variants alternate in one run, so that a noisy machine affects all. Besides
wall time it prints CPU time, which other processes disturb least:

plain     a DDP loop as in PyTorch's tutorial: fp32, the stock loss and optimizer, data in memory
bare      our model, loss, precision and optimizer in a loop that does nothing else
ours      `gptddp.train.train` as users run it: loader, agreement, log, metrics, checkpoints
"""

import argparse
import dataclasses
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from model_step import model_step
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp import train
from gptddp.config import Config, with_preset
from gptddp.distributed.connect import World, connect
from gptddp.distributed.hardware import numerics, use
from gptddp.model.gpt import GPT
from gptddp.training import entry, life
from gptddp.training.stop import StopFlag

# Steps of a variant in a round. During the first ones the loader fills its queue: the rows packed
# ahead then last much longer than the benchmark.
STEPS, SKIPPED = 40, 20
VOCABULARY = 4096


class PlainGPT(GPT):
    """Our network with a simple loss: all logits, F.cross_entropy."""

    def forward(self, x, y=None):
        logits = super().forward(x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


class Laps:
    """Wall and CPU seconds of this process between the starts of consecutive steps."""

    def __init__(self) -> None:
        self._marks: list[tuple[float, float]] = []

    def begin_step(self) -> None:
        self._marks.append((time.perf_counter(), time.process_time()))

    def seconds(self) -> list[tuple[float, float]]:
        """The seconds of each step, without the first steps (warm-up) and the last (evaluation)."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [(b[0] - a[0], b[1] - a[1]) for a, b in pairs][SKIPPED : STEPS - 2]


def plain(c: Config, world: World, laps: Laps) -> None:
    """PyTorch's defaults."""
    net = DDP(PlainGPT(c, VOCABULARY))
    optimizer = torch.optim.AdamW(net.parameters(), lr=c.lr)
    tokens = torch.randint(0, VOCABULARY, (c.batch // world.world_size, c.seq_len + 1))
    for _ in range(STEPS):
        laps.begin_step()
        optimizer.zero_grad()
        net(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
        nn.utils.clip_grad_norm_(net.parameters(), c.grad_clip)
        optimizer.step()


def bare(c: Config, world: World, laps: Laps) -> None:
    """Only our model step."""
    step = model_step(c, world, VOCABULARY)
    for _ in range(STEPS):
        laps.begin_step()
        step()


def ours(c: Config, world: World, laps: Laps) -> None:
    """The training loop; it calls `agree` once in every step."""
    agree = life.agree

    def agree_and_mark(*args):
        laps.begin_step()
        return agree(*args)

    life.agree = agree_and_mark
    try:
        train.train(entry.begin(c, world, StopFlag()))
    finally:
        life.agree = agree


def worker(rounds: int, folder: str) -> None:
    """One of the two processes; rank 0 prints."""
    logging.disable(logging.WARNING)
    seconds: dict[str, list[tuple[float, float]]] = {"plain": [], "bare": [], "ours": []}
    with connect("cpu") as world:
        c = Config(steps=STEPS, data=f"{folder}/data", **numerics(world.device))
        c = dataclasses.replace(with_preset(c, accelerator=False), eval_tokens=1)
        for i in range(rounds):
            c = dataclasses.replace(c, run_dir=f"{folder}/run{i}")
            torch.set_float32_matmul_precision("highest")
            for name, variant in (("plain", plain), ("bare", bare), ("ours", ours)):
                laps = Laps()
                variant(c, world, laps)
                seconds[name] += laps.seconds()
                use(c, world.device)  # for our two variants
        if world.rank == 0:
            report(seconds, c)


def report(seconds: dict[str, list[tuple[float, float]]], c: Config) -> None:
    """A line per variant, then the two ratios that matter."""
    wall = {name: statistics.median(w for w, _ in laps) for name, laps in seconds.items()}
    cpu = {name: statistics.median(s for _, s in laps) for name, laps in seconds.items()}
    for name in seconds:
        speed = c.batch * c.seq_len / wall[name] / 1e3
        print(
            f"{name:6} {wall[name] * 1e3:7.1f} ms a step, {speed:.1f}k tokens/s; "
            f"{cpu[name] * 1e3:.1f} ms of CPU on rank 0"
        )
    print(
        f"ours against plain: {wall['plain'] / wall['ours']:.2f} times the speed, "
        f"{cpu['plain'] / cpu['ours']:.2f} times by CPU ({c.precision})"
    )
    print(
        f"overhead of the loop over the bare step: {cpu['ours'] / cpu['bare'] - 1:+.1%} by CPU, "
        f"{wall['ours'] / wall['bare'] - 1:+.1%} by the clock"
    )


def prepare(folder: str) -> None:
    """A dataset of random words with a vocabulary of 4096."""
    words = random.Random(0)
    text = Path(folder, "text")
    text.mkdir()
    lexicon = [
        "".join(words.choices("etaoinshrdlucmfwypvbgk", k=words.randint(2, 9)))
        for _ in range(20_000)
    ]
    for i in range(400):
        (text / f"{i}.txt").write_text(" ".join(words.choices(lexicon, k=2000)))
    command = [sys.executable, "-c", "from gptddp.cli import cli; cli()", "prepare", str(text)]
    command += ["--out", f"{folder}/data", "--vocab-size", str(VOCABULARY)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder:
        worker(args.rounds, args.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        prepare(folder)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", __file__, "--folder", folder]
        command += ["--rounds", str(args.rounds)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        sys.exit(subprocess.run(command, env=env).returncode)


if __name__ == "__main__":
    main()
