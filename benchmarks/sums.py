"""What exact sums of gradients cost, beside fast ones, at several world sizes.

    python benchmarks/sums.py [--preset tiny] [--n-layer N] [--worlds 1,2,4] [--rounds 5]

Each world trains on random tokens with both kinds of sums in turns, a few steps of each, on the
same slots; the ratio of their CPU seconds, summed over all ranks, is what counts (a clock on a
machine with fewer cores than ranks measures the scheduler). Also printed: the error of each
gradient against one that is summed in float64, the bytes on the wire, and the memory.
"""

import argparse
import dataclasses
import os
import socket
import statistics
import time

import numpy as np
import torch
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp.config import Config, with_preset
from gptddp.data.lanes import owned
from gptddp.data.loader import Batch
from gptddp.data.packing import Packed, hashes, origins
from gptddp.distributed.connect import World, connect
from gptddp.distributed.hardware import numerics, use
from gptddp.model import optim, sums
from gptddp.model.gpt import build
from gptddp.train import forward_backward

VOCABULARY = {"tiny": 4096, "gpt2": 50257}
STEPS = 3  # of one kind, then of the other


class Side:
    """A model with one kind of sums."""

    def __init__(self, c: Config, world: World) -> None:
        self.c, self.world = c, world
        self.net = build(c, VOCABULARY[c.preset], world.device)
        self.optimizer = optim.build(self.net, c)
        self.ddp = DDP(self.net, gradient_as_bucket_view=True)
        self.sums = sums.build(self.ddp, c, world)

    def step(self, batch: Batch) -> torch.Tensor:
        """One step; the gradients, in one."""
        c, n = self.c, self.c.batch * self.c.seq_len
        forward_backward(self.ddp, batch, n, 1, c, self.world, self.sums)
        gradient = torch.cat([p.grad.flatten() for p in self.net.parameters()])
        nn.utils.clip_grad_norm_(self.net.parameters(), c.grad_clip)
        self.optimizer.step()
        self.sums.settle()
        self.optimizer.zero_grad(set_to_none=False)
        return gradient


def random_batch(c: Config, world: World) -> Batch:
    """This rank's rows of a step: those of a lane are the same whoever has it."""
    tokens = []
    for lane in owned(world.rank, world.world_size, c.lanes):
        rng = np.random.default_rng(lane)
        shape = (c.batch // c.lanes, c.seq_len + 1)
        tokens.append(rng.integers(0, VOCABULARY[c.preset], shape, dtype=np.uint16))
    rows = Packed(np.concatenate(tokens), np.ones((sum(map(len, tokens)), c.seq_len), bool))
    origin = origins(len(rows), 0, 0, 0)
    fp = int(hashes(rows, origin, c.pack).sum())
    nobody = np.zeros((c.lanes, 3), np.int64)
    return Batch(rows.tokens, rows.valid, rows.valid.size, fp, nobody, 0.0, -2, origin=origin)


def worker(rank: int, world_size: int, port: int, c: Config, rounds: int) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    place |= {"LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in place.items()}
    with connect("cpu") as world:
        use(c, world.device)
        sides = {k: Side(dataclasses.replace(c, reduce=k), world) for k in ("fast", "exact")}
        batch = random_batch(c, world)
        for side in sides.values():  # buckets and grids
            side.step(batch), side.step(batch)
        seconds: dict[str, list[float]] = {"fast": [], "exact": []}
        for i in range(rounds):
            for kind in sorted(sides, reverse=bool(i % 2)):
                began = time.process_time()
                for _ in range(STEPS):
                    sides[kind].step(batch)
                spent = torch.tensor([(time.process_time() - began) / STEPS], dtype=torch.float64)
                seconds[kind].append(float(world.all_reduce(spent)))
        if rank == 0:
            ratios = [e / f for e, f in zip(seconds["exact"], seconds["fast"], strict=True)]
            median = {k: statistics.median(v) for k, v in seconds.items()}
            print(
                f"{world_size} ranks: exact {median['exact']:.3f}, fast {median['fast']:.3f} CPU-s "
                f"a step, ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to "
                f"{max(ratios):.3f})",
                flush=True,
            )
        world.leave_together()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", default="tiny", choices=sorted(VOCABULARY))
    parser.add_argument("--n-layer", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--lanes", type=int)
    parser.add_argument("--worlds", default="1,2,4,5,7")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    given = {k: v for k, v in vars(args).items() if k in ("n_layer", "batch", "lanes") and v}
    c = with_preset(Config(preset=args.preset, **given), accelerator=False)
    found = numerics(torch.device("cpu")) | {"threads": 1}
    c = dataclasses.replace(c, **found)
    for world_size in map(int, args.worlds.split(",")):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        mp.spawn(worker, (world_size, port, c, args.rounds), nprocs=world_size)


if __name__ == "__main__":
    main()
