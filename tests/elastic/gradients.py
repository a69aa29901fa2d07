"""The gradient of the third step in worlds of 1 to 7 processes, one after the other.

gradients.py FOLDER RANK PORT takes part in every world that has this rank; they meet at the store
of the test. Rank 0 leaves FOLDER/<world size>.npy, the gradients of all parameters in one.
"""

import sys
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as td
from loading import LANES, SEED, SEQ_LEN, corpus, open_loader
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp import dist, model
from gptddp.config import Config
from gptddp.state import agree
from gptddp.train import forward_backward, warm_up

CONFIG = Config(
    n_layer=2, n_head=2, n_embd=32, seq_len=SEQ_LEN, lanes=LANES, batch=3 * LANES, micro_batch=2,
    precision="fp32", device="cpu", seed=SEED,
)  # fmt: skip
WORLD_SIZES = 7
EMPTY_LANE = 3  # its rows have no target


def rank_main(folder: str, rank: int, world_size: int, store: td.Store) -> None:
    torch.set_num_threads(1)
    dist.use_fast_fp32(torch.device("cpu"))
    td.init_process_group(
        "gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=60),
        store=td.PrefixStore(str(world_size), store),
    )  # fmt: skip
    world = dist.Dist(rank, rank, world_size, world_size, torch.device("cpu"), 1, 0, "", None)
    net = model.build(CONFIG, 257, world.device)
    ddp = DDP(net, gradient_as_bucket_view=True)
    warm_up(ddp, CONFIG, world)
    with open_loader(corpus(), batch=CONFIG.batch, rank=rank, world_size=world_size) as loader:
        batch = [loader.next() for _ in range(3)][-1]
    mine = np.repeat(np.flatnonzero(batch.cursors.any(axis=1)), CONFIG.batch // LANES)
    batch.valid[mine == EMPTY_LANE] = False
    object.__setattr__(batch, "targets", int(batch.valid.sum()))
    agreed = agree(batch, stop=False, out_of_time=False, save=False, world=world)
    forward_backward(ddp, batch, agreed.targets, 2, CONFIG, world)
    if rank == 0:
        flat = torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])
        np.save(f"{folder}/{world_size}.npy", flat.numpy())
    world.part()
    td.destroy_process_group()


def main(folder: str, rank: int, port: int) -> None:
    store = td.TCPStore("127.0.0.1", port, is_master=False)
    # The largest first: torch numbers the groups of a process, and the members must agree.
    for world_size in range(WORLD_SIZES, rank, -1):
        rank_main(folder, rank, world_size, store)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
