"""Training speed on CPUs compared with nanoGPT, in CPU time: both train `tiny` alternately.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/nanogpt.py nanoGPT [--rounds 5] [--learn 100]

Two processes with one thread each, a vocabulary of 4096, random tokens, a step of 48 rows of 256
tokens in micro-batches of 4. nanoGPT's loop needs CUDA for several processes, and never uses bf16
on a CPU. So the body of its loop runs its unchanged model and optimizer, with gloo and without
loading data: in fp32 and in bf16 autocast. Ours is the model step with the settings that the table
of processors chooses, exact sums and optimizer included; `benchmarks/trainer.py` measures the cost
of the loop around it.

Then each of them learns for `--learn` steps at the peak rate, on the same rows of a language in
which eight tokens may follow each token. The losses at equal tokens are printed, so that a step
that is faster but worse would be noticed.
"""

import argparse
import contextlib
import dataclasses
import io
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_step import model_step, random_rows
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp.config import Config, with_preset
from gptddp.distributed.connect import World, connect
from gptddp.distributed.hardware import cpu_info, numerics, use

STEPS = 5  # of a variant in a round; the first one warms up, and is not counted
VOCABULARY = 4096
FOLLOW = 8  # tokens that may follow another one, equally likely: ln 8 = 2.079 nats
LAST = 10  # the mean loss of so many steps is printed

Step = Callable[[], float]
Rows = Callable[[], np.ndarray]


def their_step(
    folder: str, c: Config, world: World, precision: str, rows: Rows | None = None
) -> Step:
    """A step as in the loop of nanoGPT's train.py; `rows` and its result as in `model_step`."""
    if folder not in sys.path:
        sys.path.insert(0, folder)
    theirs: Any = __import__("model")
    shape = {"n_layer": c.n_layer, "n_head": c.n_head, "n_embd": c.n_embd, "dropout": 0.0}
    with contextlib.redirect_stdout(io.StringIO()):
        net = theirs.GPT(
            theirs.GPTConfig(block_size=c.seq_len, vocab_size=VOCABULARY, bias=True, **shape)
        )
        optimizer = net.configure_optimizers(c.weight_decay, c.lr, c.betas, "cpu")
    ddp = DDP(net)
    same = random_rows(c, world, VOCABULARY)

    def step() -> float:
        tokens = torch.from_numpy((rows() if rows else same).astype(np.int64))
        parts, mean = tokens.split(c.micro_batch), 0.0
        for i, part in enumerate(parts):
            ddp.require_backward_grad_sync = i == len(parts) - 1
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                _, loss = ddp(part[:, :-1].contiguous(), part[:, 1:].contiguous())
                loss = loss / len(parts)
            loss.backward()
            mean += loss.item()
        nn.utils.clip_grad_norm_(net.parameters(), c.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(world.all_reduce(torch.tensor([mean]))) / world.world_size

    return step


def language(c: Config, world: World) -> Rows:
    """All ranks: rows to learn from; each call gives the same sequence."""
    follow = np.random.default_rng(0).integers(0, VOCABULARY, (VOCABULARY, FOLLOW))
    draw = np.random.default_rng(1 + world.rank)

    def rows() -> np.ndarray:
        count = c.batch // world.world_size
        tokens = np.empty((count, c.seq_len + 1), np.uint16)
        tokens[:, 0] = draw.integers(0, VOCABULARY, count)
        for i in range(c.seq_len):
            tokens[:, i + 1] = follow[tokens[:, i], draw.integers(0, FOLLOW, count)]
        return tokens

    return rows


def cpu_s(step: Step, world: World) -> float:
    """All ranks: CPU seconds of a step, summed over the ranks."""
    step()
    begin = time.process_time()
    for _ in range(STEPS - 1):
        step()
    used = torch.tensor([time.process_time() - begin], dtype=torch.float64)
    return float(world.all_reduce(used)) / (STEPS - 1)


def worker(folder: str, rounds: int, learn: int) -> None:
    """One of the two processes; rank 0 prints."""
    logging.disable(logging.WARNING)
    with connect("cpu") as world:
        c = with_preset(Config(**numerics(world.device)), accelerator=False)
        default = torch.get_float32_matmul_precision()
        ours = f"gptddp, {c.precision} ({c.matmul})"

        def made(rows: Callable[[], Rows | None]) -> dict[str, Step]:
            steps = {
                f"nanoGPT, {it}": their_step(folder, c, world, it, rows())
                for it in ("fp32", "bf16")
            }
            return steps | {ours: model_step(c, world, VOCABULARY, rows())}

        def as_it_computes(name: str) -> None:
            torch.set_float32_matmul_precision(default)
            if name == ours:
                use(dataclasses.replace(c, threads=1), world.device)

        seconds: dict[str, list[float]] = {}
        steps = made(lambda: None)
        for _ in range(rounds):
            for name, step in steps.items():
                as_it_computes(name)
                seconds.setdefault(name, []).append(cpu_s(step, world))
        if world.rank == 0:
            report(seconds, c, ours)
        for name, step in made(lambda: language(c, world)).items() if learn else ():
            as_it_computes(name)
            losses = [step() for _ in range(learn)]
            if world.rank == 0:
                last = statistics.mean(losses[-LAST:])
                print(f"{name:22} {losses[0]:.4f} -> {last:.4f} nats after {learn} steps")


def report(seconds: dict[str, list[float]], c: Config, ours: str) -> None:
    """A line per variant, then ours compared with the faster of nanoGPT's."""
    print(cpu_info().get("model name", "an unknown processor"))
    for name, used in seconds.items():
        speed = c.batch * c.seq_len / statistics.median(used)
        spread = ", ".join(f"{it:.2f}" for it in used)
        print(f"{name:22} {speed / 1e3:5.1f} k tokens a CPU second; a step's: {spread} s")
    theirs = [used for name, used in seconds.items() if name != ours]
    best = min(theirs, key=statistics.median)
    ratios = [a / b for a, b in zip(best, seconds[ours], strict=True)]
    print(
        f"gptddp is {statistics.median(ratios):.2f} times as fast as the faster of the two "
        f"(rounds: {min(ratios):.2f} to {max(ratios):.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", help="a clone of nanoGPT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--learn", type=int, default=100, help="steps; 0: none")
    args = parser.parse_args()
    if not Path(args.folder, "model.py").is_file():
        parser.error(f"{args.folder} has no model.py: give the folder of a clone of nanoGPT")
    if "RANK" in os.environ:
        worker(str(Path(args.folder).resolve()), args.rounds, args.learn)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", __file__, args.folder]
    command += ["--rounds", str(args.rounds), "--learn", str(args.learn)]
    sys.exit(subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode)


if __name__ == "__main__":
    main()
