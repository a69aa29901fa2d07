"""The cost of exact sums of gradients, compared with fast sums, at several world sizes.

    python benchmarks/sums.py [--shapes tiny,gpt2] [--worlds 1,2,4,5,7] [--rounds 5]

A row for each shape and number of ranks, all on this machine, with both kinds of sums on the same
random tokens:

CPU-s    per step, summed over the ranks: wall time with fewer cores than ranks measures the
         scheduler. Both kinds alternate in the same processes
MB       per step, sent by all ranks: the traffic of the loopback, that of other processes included
MiB      the largest peak of a rank's memory, in processes with only one kind
error    of a gradient, compared with the float64 sum of the same micro-batches: the largest over
         all tensors, relative to the tensor's largest gradient

The model of `gpt2` has two layers and a vocabulary of 16384, so that seven of them fit into one
machine. Each rank has one slot of ten rows, as with 48 ranks, where exact sums cost most.
"""

import argparse
import dataclasses
import os
import resource
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp.config import Config, with_preset
from gptddp.data.lanes import owned
from gptddp.data.loader import Batch
from gptddp.distributed.connect import World, connect
from gptddp.distributed.hardware import numerics, use
from gptddp.model import optim, sums
from gptddp.model.gpt import build
from gptddp.model.micro_batches import autocast, of_step
from gptddp.train import forward_backward

SHAPES = {
    "tiny": Config(preset="tiny"),
    "gpt2": Config(preset="gpt2", n_layer=2, micro_batch=1),
}
VOCABULARY = {"tiny": 4096, "gpt2": 16384}
KINDS = ("fast", "exact")
STEPS = {"tiny": 3, "gpt2": 1}  # per turn
STEP = 1  # a step that does not hash its rows again


class Side:
    """A model with one kind of sums."""

    def __init__(self, c: Config, world: World) -> None:
        self.c, self.world, self.targets = c, world, c.batch * c.seq_len
        self.net = build(c, VOCABULARY[c.preset], world.device)
        self.optimizer = optim.build(self.net, c, world)
        self.ddp = DDP(self.net, gradient_as_bucket_view=True)
        self.sums = sums.build(self.ddp, c, world)
        self.batch = random_batch(c, world)
        for _ in range(2):  # settle buckets and grids
            self.step()

    def step(self) -> None:
        """All ranks: one step."""
        self.sum()
        nn.utils.clip_grad_norm_(self.net.parameters(), self.c.grad_clip)
        self.optimizer.prepare()
        self.optimizer.step()
        self.sums.stepped()
        self.optimizer.zero_grad()

    def sum(self) -> None:
        """All ranks: compute the gradients of a step."""
        forward_backward(self.ddp, self.batch, self.targets, STEP, self.c, self.world, self.sums)

    def error(self) -> float:
        """All ranks: the error of the gradients against float64; spoils the model's state."""
        self.sum()
        params = list(self.net.parameters())
        found = [p.grad.clone() for p in params]
        wanted = [torch.zeros(p.shape, dtype=torch.float64) for p in params]
        self.optimizer.zero_grad()
        factor = self.sums.begin(self.targets)
        with self.ddp.no_sync():
            for part in of_step(self.batch, STEP, self.c, self.world.device):
                with autocast(self.c, self.world.device):
                    nats = self.ddp(part.x, part.y, part.positions)
                (nats * factor).backward()
                for p, total in zip(params, wanted, strict=True):
                    total += p.grad
                    p.grad.zero_()
        errors = []
        for mine, grad in zip(wanted, found, strict=True):
            total = self.world.all_reduce(mine) / (factor * self.targets)  # all ranks
            errors.append(float((grad - total).abs().max() / total.abs().max()))
        return max(errors)


def random_batch(c: Config, world: World) -> Batch:
    """This rank's rows of a step; the rows of a lane do not depend on the rank."""
    rows, own = [], owned(world.rank, world.world_size, c.lanes)
    for lane in own:
        shape = (c.batch // c.lanes, c.seq_len + 1)
        rng = np.random.default_rng(lane)
        rows.append(rng.integers(0, VOCABULARY[c.preset], shape, dtype=np.uint16))
    tokens = np.concatenate(rows)
    valid = np.ones((len(tokens), c.seq_len), bool)
    return Batch(tokens, valid, own, valid.size, 0, np.zeros((c.lanes, 3), np.int64), 0.0)


# -- on all ranks ----------------------------------------------------------------------------------


def turns(world: World, c: Config, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """All ranks: (CPU seconds, MB) of a step, by kind and round."""
    sides = {kind: Side(dataclasses.replace(c, reduce=kind), world) for kind in KINDS}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for i in range(rounds):
        for kind in KINDS if i % 2 else reversed(KINDS):
            world.all_reduce(torch.zeros(1))  # all ranks have finished the previous turn
            carried, began = loopback_bytes(), time.process_time()
            for _ in range(STEPS[c.preset]):
                sides[kind].step()
            mine = torch.tensor([time.process_time() - began], dtype=torch.float64)
            seconds = float(world.all_reduce(mine))  # all ranks
            carried = loopback_bytes() - carried
            found[kind].append((seconds / STEPS[c.preset], carried / STEPS[c.preset] / 1e6))
    return found


def alone(world: World, c: Config) -> tuple[float, float]:
    """All ranks: (MiB of the rank that needs the most memory, error) for one kind."""
    side = Side(c, world)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return max(world.gather(peak)), side.error()


def loopback_bytes() -> int:
    """Bytes that the loopback interface has received since the machine started."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (line,) = (line for line in lines if line.strip().startswith("lo:"))
    return int(line.split(":")[1].split()[0])


def worker(rank: int, world_size: int, port: int, work: Callable[..., Any], args: Any, out: Any):
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    place |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in place.items()}
    with connect("cpu") as world:
        use(args[0], world.device)
        found = work(world, *args)
        if rank == 0:
            out.put(found)
        world.leave_together()


# -- the table -------------------------------------------------------------------------------------


def on_ranks(world_size: int, work: Callable[..., Any], *args: Any) -> Any:
    """The result of `work(world, *args)` on rank 0 of so many new processes; args[0]: a Config."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    out = mp.get_context("spawn").SimpleQueue()
    mp.spawn(worker, (world_size, port, work, args, out), nprocs=world_size)
    return out.get()


def pair(name: str, fast: float, exact: float, ratios: list[float]) -> str:
    """`CPU-s 1.234 1.357 = 1.100 (1.090 to 1.111)`: fast, exact, and the ratio of the rounds."""
    spread = f" ({min(ratios):.3f} to {max(ratios):.3f})" if len(ratios) > 1 else ""
    return f"{name} {fast:.4g} {exact:.4g} = {statistics.median(ratios):.3f}{spread}"


def row(shape: str, world_size: int, rounds: int) -> str:
    c = with_preset(SHAPES[shape], accelerator=False)
    c = dataclasses.replace(c, **numerics(torch.device("cpu")) | {"threads": 1})
    if shape == "gpt2":  # a slot for each rank, as large as in a run
        c = dataclasses.replace(c, lanes=world_size, batch=c.batch // c.lanes * world_size)
    (fast_mib, fast_error), (mib, error) = (
        on_ranks(world_size, alone, dataclasses.replace(c, reduce=kind)) for kind in KINDS
    )
    found = on_ranks(world_size, turns, c, rounds)
    parts = []
    for i, name in enumerate(("CPU-s", "MB") if world_size > 1 else ("CPU-s",)):
        fast, exact = ([of_round[i] for of_round in found[kind]] for kind in KINDS)
        ratios = [e / f for e, f in zip(exact, fast, strict=True)]
        parts.append(pair(name, statistics.median(fast), statistics.median(exact), ratios))
    parts.append(pair("MiB", fast_mib, mib, [mib / fast_mib]))
    parts.append(f"error {fast_error:.1e} {error:.1e}")
    return f"{shape}, {world_size} ranks, fast and exact: {'; '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--worlds", default="1,2,4,5,7")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    for shape in args.shapes.split(","):
        for world_size in map(int, args.worlds.split(",")):
            print(row(shape, world_size, args.rounds), flush=True)


if __name__ == "__main__":
    main()
