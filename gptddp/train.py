"""Train a GPT: one process, many on one machine, or many pods.

    python -m gptddp.train --data DATASET --run-dir RUN
    torchrun --nproc-per-node 2 -m gptddp.train --data DATASET --run-dir RUN
    gptddp-k8s submit --replicas 4 --local

`train` is one life of a run: it restores the newest state, runs the loop and saves a last
checkpoint. Every rank runs it; `# all ranks` marks a line in which each rank waits for the others.
`life` handles faults, stops, saves and logs (training/life.py). training/entry.py turns a command
line into a life.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp.config import Config
from gptddp.data.loader import Batch
from gptddp.distributed.connect import World
from gptddp.distributed.hardware import use
from gptddp.distributed.process import run
from gptddp.model import gpt, optim
from gptddp.model.buckets import settle_buckets
from gptddp.model.micro_batches import autocast, of_step
from gptddp.model.optim import Optimizer
from gptddp.model.sums import Sums
from gptddp.model.sums import build as sums_of
from gptddp.training import entry
from gptddp.training.life import Life


def train(life: Life) -> None:
    """All ranks: do the remaining steps of a run.

    audit.py calls it with a Replay, which compares instead of recording.
    """
    c, world = life.config, life.world
    with life.guard():
        # -- the model, from the same seed on every rank, and its state -------------------------
        use(c, world.device)  # precision of products, threads
        gpt.check_size(c, life.tokenizer.vocab_size, world.device)
        net = gpt.build(c, life.tokenizer.vocab_size, world.device)
        optimizer = optim.build(net, c, world)
        ddp = DDP(net, gradient_as_bucket_view=True)  # all ranks
        sums = sums_of(ddp, c, world)
        settle_buckets(ddp, sums, c, world)  # all ranks
        state = optim.state_tensors(net, optimizer) | sums.tensors()
        life.restore(net, state, sums)  # all ranks

        # -- the worlds: each lasts until a rank is lost or joins, the last until the end --------
        while not life.worlds.life_is_over:
            with life.worlds.around():  # all ranks; a lost peer ends this block, not the process
                steps(life, ddp, optimizer, sums)


def steps(life: Life, ddp: DDP, optimizer: Optimizer, sums: Sums) -> None:
    """All ranks: do the remaining steps, as long as the world lasts."""
    c, world = life.config, life.world
    optimizer.zero_grad()  # an interrupted step may have left gradients
    # the previous life or world may have ended after a step, but before its evaluation or its
    # comparison of the replicas: then do them now
    life.complete_line()  # all ranks
    while life.goes_on:
        batch = life.next_batch()
        agreed = life.agree(batch)  # all ranks: targets, bad rows, stop, time, save, a new world
        if not life.goes_on:
            break
        if agreed.bad:
            life.quarantine(batch)  # all ranks; then the step is repeated without these rows
            continue
        lr = optimizer.set_lr(c, life.progress)
        nats = forward_backward(ddp, batch, agreed.targets, life.step, c, world, sums)
        loss = nats / agreed.targets
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), c.grad_clip or math.inf).item()
        optimizer.prepare()  # all ranks: Muon gathers its updates; the state is still unchanged
        numbers = {"loss": loss, "grad_norm": norm, "lr": lr}
        with life.stepping(batch, agreed, numbers, sums.wait_s) as finite:
            if finite:  # else the step is skipped, on every rank
                optimizer.step()
                sums.stepped()
            optimizer.zero_grad()
        if life.is_evaluation_due:
            life.evaluate()  # all ranks
        if agreed.save or life.is_check_due:
            life.check_replicas()  # all ranks
        life.record()
        if agreed.save:
            life.save()
    if not life.worlds.ends:
        # if `agree` has found that the time is up, the last step still lacks its evaluation
        life.complete_line()  # all ranks
        life.end()  # all ranks: wait until the last state is on disk, ten minutes at most


def forward_backward(
    ddp: DDP, batch: Batch, targets: int, step: int, c: Config, world: World, sums: Sums
) -> float:
    """All ranks: compute the gradient of the mean loss over all targets of the step.

    Returns the summed loss in nats. Ranks may have different numbers of slots (a slot: the rows of
    a lane in a step), so each synchronises in its last micro-batch only. no_sync is around the
    forward pass too: there DDP decides whether the backward pass synchronises.
    """
    factor = sums.begin(targets)  # multiplies each loss
    while True:  # exact sums try again if a grid did not fit
        for part in of_step(batch, step, c, world.device):
            world.check()  # do not finish a step that a lost peer has interrupted
            if c.dropout:
                torch.manual_seed(part.seed(c, step))
            with nullcontext() if part.ends_step else ddp.no_sync():
                with autocast(c, world.device):
                    nats = ddp(part.x, part.y, part.positions)
                sums.took(part.slot, nats)
                (nats * factor).backward()  # all ranks, in each rank's last micro-batch
            if part.ends_slot and not part.ends_step:
                sums.close(part.slot)  # DDP's hook does this for the last slot
        if (total := sums.finish()) is not None:  # all ranks
            return total


def main(args: Sequence[str] | None = None) -> int:
    """Parse, connect and train; return the exit code."""
    return entry.main(train, args)


if __name__ == "__main__":
    run(main)
