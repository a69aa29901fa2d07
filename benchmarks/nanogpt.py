"""Training speed on CPUs beside nanoGPT, in CPU time: both train `tiny`, in turns, in one run.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/nanogpt.py nanoGPT [--rounds 5]

Two processes with one thread each, a vocabulary of 4096, random tokens, a step of 48 rows of 256
tokens in micro-batches of 4. nanoGPT's loop asks for CUDA where there are several processes, and
never turns on bf16 on a CPU. So its model and its optimizer are run as they are by the body of its
loop, with gloo and without the loading of data: in fp32 and in bf16 autocast. Ours is the model
step with what the table of processors chooses, exact sums and optimizer included; what the loop
around it costs is what `benchmarks/trainer.py` measures.
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

import torch
from model_step import model_step
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp.config import Config, with_preset
from gptddp.distributed.connect import World, connect
from gptddp.distributed.hardware import cpu_info, numerics, use

STEPS = 5  # of a variant in a round; the first one warms up, and is not counted
VOCABULARY = 4096

Step = Callable[[], object]


def their_step(folder: str, c: Config, world: World, precision: str) -> Step:
    """A step as in the loop of nanoGPT's train.py."""
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
    rows = c.batch // world.world_size
    tokens = torch.randint(0, VOCABULARY, (rows, c.seq_len + 1))
    parts = tokens.split(c.micro_batch)

    def step() -> None:
        for i, part in enumerate(parts):
            ddp.require_backward_grad_sync = i == len(parts) - 1
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                _, loss = ddp(part[:, :-1].contiguous(), part[:, 1:].contiguous())
                loss = loss / len(parts)
            loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), c.grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def cpu_s(step: Step, world: World) -> float:
    """All ranks: seconds of CPU that a step takes, of both together."""
    step()
    begin = time.process_time()
    for _ in range(STEPS - 1):
        step()
    used = torch.tensor([time.process_time() - begin], dtype=torch.float64)
    return float(world.all_reduce(used)) / (STEPS - 1)


def worker(folder: str, rounds: int) -> None:
    """One of the two processes; rank 0 prints."""
    logging.disable(logging.WARNING)
    with connect("cpu") as world:
        c = with_preset(Config(**numerics(world.device)), accelerator=False)
        default = torch.get_float32_matmul_precision()
        steps = {f"nanoGPT, {it}": their_step(folder, c, world, it) for it in ("fp32", "bf16")}
        ours = f"gptddp, {c.precision} ({c.matmul})"
        steps[ours] = model_step(c, world, VOCABULARY)
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                torch.set_float32_matmul_precision(default)
                if name == ours:
                    use(dataclasses.replace(c, threads=1), world.device)
                seconds[name].append(cpu_s(step, world))
        if world.rank == 0:
            report(seconds, c, ours)


def report(seconds: dict[str, list[float]], c: Config, ours: str) -> None:
    """A line a variant, then ours against the faster one of theirs."""
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
    args = parser.parse_args()
    if not Path(args.folder, "model.py").is_file():
        parser.error(f"{args.folder} has no model.py: give the folder of a clone of nanoGPT")
    if "RANK" in os.environ:
        worker(str(Path(args.folder).resolve()), args.rounds)
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", __file__, args.folder, "--rounds", str(args.rounds)]
    sys.exit(subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}).returncode)


if __name__ == "__main__":
    main()
