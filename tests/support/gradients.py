"""The gradient of the third step in worlds of 1 to 7 processes, each world a set of new ones.

gradients.py FOLDER imports torch once and forks the ranks, one world after the other. Rank 0 of
each leaves FOLDER/<reduce>.<world size>.npy: the gradients of all parameters in one.
"""

import dataclasses
import os
import signal
import socket
import sys

import numpy as np
import torch
import torch._dynamo  # noqa: F401  # DDP imports it: once here, and not in every rank
from support.loaders import LANES, SEED, SEQ_LEN, corpus, open_loader
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp.config import Config, with_preset
from gptddp.distributed.connect import World, connect
from gptddp.distributed.process import run
from gptddp.model import sums
from gptddp.model.gpt import build
from gptddp.train import forward_backward, warm_up
from gptddp.training.agree import agree
from gptddp.training.clock import PhaseClock, RankSeconds

CONFIG = with_preset(
    Config(
        n_layer=2,
        n_head=2,
        n_embd=32,
        seq_len=SEQ_LEN,
        lanes=LANES,
        batch=3 * LANES,
        micro_batch=2,
        precision="fp32",
        device="cpu",
        seed=SEED,
    ),
    accelerator=False,
)
WORLD_SIZES = 7
EMPTY_LANE = 3  # its rows have no target
PATIENCE_S = 60  # of a rank, which SIGALRM ends then


def gradients(world: World, reduce: str) -> np.ndarray:
    """All ranks: every gradient of the step, in one array."""
    torch.set_num_threads(1)
    net = build(CONFIG, 257, world.device)
    ddp = DDP(net, gradient_as_bucket_view=True)
    made = sums.build(ddp, dataclasses.replace(CONFIG, reduce=reduce), world)
    warm_up(ddp, CONFIG, world)
    where = {"rank": world.rank, "world_size": world.world_size}
    with open_loader(corpus(), batch=CONFIG.batch, **where) as loader:
        batch = [loader.next() for _ in range(3)][-1]
    mine = np.repeat(np.flatnonzero(batch.cursors.any(axis=1)), CONFIG.batch // LANES)
    batch.valid[mine == EMPTY_LANE] = False
    object.__setattr__(batch, "targets", int(batch.valid.sum()))
    spent = RankSeconds(PhaseClock(), world)
    agreed = agree(batch, False, 0.0, save=False, late=False, logged=0, spent=spent, world=world)
    forward_backward(ddp, batch, agreed.targets, 2, CONFIG, world, made)
    return torch.cat([p.grad.ravel() for p in net.parameters() if p.grad is not None]).numpy()


def rank_main(folder: str) -> None:
    """One rank, from joining its world to leaving it, as the trainer does."""
    signal.alarm(PATIENCE_S)
    with connect("cpu") as world:
        for reduce in ("exact", "fast"):
            found = gradients(world, reduce)
            if world.rank == 0:
                np.save(f"{folder}/{reduce}.{world.world_size}.npy", found)
        world.leave_together()


def main(folder: str) -> None:
    for world_size in range(1, WORLD_SIZES + 1):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        ranks = []
        for rank in range(world_size):
            place = {"RANK": rank, "LOCAL_RANK": rank}
            place |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
            os.environ |= {key: str(value) for key, value in place.items()}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            if not (pid := os.fork()):
                run(lambda: rank_main(folder))
                sys.exit()
            ranks.append(pid)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        assert not any(codes), f"{world_size} processes: exit codes {codes}"


if __name__ == "__main__":
    main(sys.argv[1])
