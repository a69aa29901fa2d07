"""Training speed on CPUs: ours against PyTorch's plain defaults, and the loop's own overhead.

    python benchmarks/trainer.py [--rounds 5]

Two processes train the model `tiny` with a vocabulary of 4096 on random text, a step of 48 rows of
256 tokens. The three variants take turns in one run, so that a noisy machine is noisy for all:

plain     a DDP loop as in PyTorch's tutorial: fp32, the stock loss and optimizer, data in memory
bare      our model, loss, precision and optimizer in a loop that does nothing else
ours      `gptddp.train.train` as users run it: loader, agreement, log, metrics, checkpoints
"""

import argparse
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp import dist, model, optim
from gptddp.config import Config, with_preset
from gptddp.loader import Batch
from gptddp.train import StopFlag, forward_backward, train

STEPS, SKIPPED = 14, 4  # of a variant in a round; the first ones warm up
VOCABULARY = 4096


class PlainGPT(model.GPT):
    """The same network with the loss as one writes it first: all logits, F.cross_entropy."""

    def forward(self, x, y=None):
        logits = super().forward(x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def plain(c: Config, world: dist.Dist) -> list[float]:
    """PyTorch's defaults: seconds of each step."""
    net = DDP(PlainGPT(c, VOCABULARY))
    optimizer = torch.optim.AdamW(net.parameters(), lr=c.lr)
    rows = c.batch // world.world_size
    tokens = torch.randint(0, VOCABULARY, (rows, c.seq_len + 1))
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        optimizer.zero_grad()
        net(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()).backward()
        nn.utils.clip_grad_norm_(net.parameters(), c.grad_clip)
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return times


def bare(c: Config, world: dist.Dist) -> list[float]:
    """Our model step and nothing around it: seconds of each step."""
    net = model.build(c, VOCABULARY, world.device)
    optimizer, ddp = optim.build(net, c), DDP(net, gradient_as_bucket_view=True)
    rows = c.batch // world.world_size
    tokens = np.random.randint(0, VOCABULARY, (rows, c.seq_len + 1)).astype(np.uint16)
    valid = np.ones((rows, c.seq_len), bool)
    batch = Batch(tokens, valid, valid.size, 0, np.zeros((c.lanes, 3), np.int64), 0.0)
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        forward_backward(ddp, batch, valid.size * world.world_size, 0, c, world)
        nn.utils.clip_grad_norm_(net.parameters(), c.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        times.append(time.perf_counter() - begin)
    return times


def ours(c: Config, world: dist.Dist, folder: str) -> list[float]:
    """The training loop: seconds from the end of one step to the end of the next."""
    train(c, world, StopFlag())
    world.barrier()
    lines = (Path(folder) / "log.1.jsonl").read_text().splitlines()
    ends = [json.loads(line)["time"] for line in lines]
    return [b - a for a, b in zip(ends, ends[1:], strict=False)][: STEPS - 2]  # the last evaluates


def worker(rounds: int, folder: str) -> None:
    """One of the two processes; rank 0 prints."""
    import dataclasses

    logging.disable(logging.WARNING)
    seconds: dict[str, list[float]] = {"plain": [], "bare": [], "ours": []}
    with dist.connect("cpu") as world:
        fast = dist.has_fast_bf16(world.device)
        c = Config(steps=STEPS, data=f"{folder}/data", precision="bf16" if fast else "fp32")
        c = with_preset(c, accelerator=False)
        if not fast:
            dist.use_fast_fp32(world.device)
        for i in range(rounds):
            run = f"{folder}/run{i}"
            mine = dataclasses.replace(c, run_dir=run, eval_tokens=1)
            torch.set_float32_matmul_precision("highest")
            seconds["plain"] += plain(c, world)[SKIPPED:]
            if not fast:
                dist.use_fast_fp32(world.device)
            seconds["bare"] += bare(c, world)[SKIPPED:]
            seconds["ours"] += ours(mine, world, run)[SKIPPED:]
        if world.rank == 0:
            report(seconds, c)


def report(seconds: dict[str, list[float]], c: Config) -> None:
    """A line a variant, then the two ratios that matter."""
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    for name, times in seconds.items():
        speed = c.batch * c.seq_len / middle[name] / 1e3
        print(f"{name:6} {middle[name] * 1e3:7.1f} ms a step (min {min(times) * 1e3:.1f}, "
              f"max {max(times) * 1e3:.1f}), {speed:.1f}k tokens/s")  # fmt: skip
    print(f"ours against plain: {middle['plain'] / middle['ours']:.2f} times the speed "
          f"({c.precision})")  # fmt: skip
    print(f"overhead of the loop over the bare step: {middle['ours'] / middle['bare'] - 1:+.1%}")


def prepare(folder: str) -> None:
    """A dataset of random words with a vocabulary of 4096."""
    words = random.Random(0)
    text = Path(folder, "text")
    text.mkdir()
    lexicon = ["".join(words.choices("etaoinshrdlucmfwypvbgk", k=words.randint(2, 9)))
               for _ in range(20_000)]  # fmt: skip
    for i in range(400):
        (text / f"{i}.txt").write_text(" ".join(words.choices(lexicon, k=2000)))
    command = [sys.executable, "-c", "from gptddp import main; main()", "prepare", str(text)]
    command += ["--out", f"{folder}/data", "--vocab-size", str(VOCABULARY)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
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
