"""Train a GPT: one process, many on one machine, or many pods.

    python -m gptddp.train --data DATASET --run-dir RUN
    torchrun --nproc-per-node 2 -m gptddp.train --data DATASET --run-dir RUN
    gptddp-k8s submit --replicas 4 --local

Read it downwards: `train` finds the newest state of a run, and `live` is one life of it, through
the loop to its last checkpoint; `main` parses and connects. What a fault, a stop or a save needs is
behind `life` (training/life.py).
"""

import logging
import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp.advice import advice
from gptddp.config import Config
from gptddp.data import lanes
from gptddp.data.dataset import Dataset, open_dataset
from gptddp.data.loader import Batch
from gptddp.data.tokenizer import Tokenizer
from gptddp.distributed import environment
from gptddp.distributed.connect import World, connect
from gptddp.distributed.hardware import use
from gptddp.distributed.peers import is_lost_peer
from gptddp.distributed.process import run
from gptddp.distributed.pulse import Listening
from gptddp.distributed.report import VisibleFormatter, report
from gptddp.distributed.torch_private import TRAINER, check_torch
from gptddp.errors import ConfigError, GptddpError, LifeLost, Stopped, Superseded
from gptddp.files import patiently
from gptddp.flags import flag, from_args
from gptddp.model import gpt, optim
from gptddp.model.evaluate import Evaluation, evaluate
from gptddp.model.micro_batches import autocast, of_step
from gptddp.model.sums import Sums
from gptddp.model.sums import build as sums_of
from gptddp.run import crash_loop
from gptddp.training.begin import begin
from gptddp.training.clock import PhaseClock
from gptddp.training.life import Life
from gptddp.training.rows import Rows
from gptddp.training.samples import Samples
from gptddp.training.stop import StopFlag

log = logging.getLogger("gptddp")


def train(config: Config, world: World, stop: StopFlag) -> None:
    """Train until the last step. Raises Stopped when a signal ends it earlier."""
    clock = PhaseClock()  # gives every second from here on to one phase
    # Damage is refused before anything is written, or by `begin`, which knows the run's on_bad.
    dataset = patiently(lambda: open_dataset(config.data, config.on_bad or "quarantine"))
    tokenizer = patiently(dataset.tokenizer)

    life = begin(config, dataset, world, stop, clock)  # all ranks: newest state, disk or memory
    notes = [*dataset.warnings(), *tokenizer.warnings(), *advice(life.config, world.world_size)]
    for warning in notes if world.rank == 0 else ():
        log.warning("%s", warning)
    live(life, dataset, tokenizer, stop)


def live(life: Life, dataset: Dataset, tokenizer: Tokenizer, stop: StopFlag) -> None:
    """All ranks: a life of the run, from its newest state to its end. An audit lives it again."""
    c, world = life.config, life.world
    rows = Rows(dataset, c, world, life.progress.data)
    with life.guard(rows):  # lost peer, divergence, crash loop
        if not life.step:  # a mistake in them is told at once; a recovery must not wait for them
            _ = rows.validation

        # -- the model, from the same seed on every rank, and its state -------------------------
        use(c, world.device)
        gpt.check_size(c, tokenizer.vocab_size, world.device)
        net = gpt.build(c, tokenizer.vocab_size, world.device)
        optimizer = optim.build(net, c, world)
        ddp = DDP(net, gradient_as_bucket_view=True)
        sums = sums_of(ddp, c, world)
        warm_up(ddp, c, world)  # all ranks
        tensors = optim.state_tensors(net, optimizer) | sums.tensors()
        life.restore(tensors, net.n_params())  # all ranks

        samples = Samples(c, life.origin.generation) if life.recorder and c.sample_tokens else None

        def validate() -> Evaluation | None:
            found = evaluate(net, rows.validation, tokenizer, c, world, lambda: stop.asked)
            if found and samples:  # rank 0 only
                samples.write(life.step, net, tokenizer)
            return found

        # -- the loop ---------------------------------------------------------------------------
        life.complete_line(validate)  # all ranks: the life before may have been cut off
        while life.goes_on:
            batch = life.next_batch()
            agreed = life.agree(batch)  # all ranks: targets, bad rows, stop, time, save
            if not life.goes_on:
                break
            if agreed.bad:
                life.quarantine(batch)  # all ranks; then the same step without those rows
                continue
            lr = optimizer.set_lr(c, life.progress)
            nats = forward_backward(ddp, batch, agreed.targets, life.step, c, world, sums)
            loss = nats / agreed.targets
            norm = nn.utils.clip_grad_norm_(net.parameters(), c.grad_clip or math.inf).item()
            optimizer.prepare()  # all ranks; it changes nothing that a life hands on
            with life.stepping(
                batch, agreed, sums.wait_s, loss=loss, grad_norm=norm, lr=lr
            ) as finite:
                if finite:
                    optimizer.step()
                    sums.settle()
                optimizer.zero_grad()
            if life.is_evaluation_due:
                life.evaluate(validate)  # all ranks
            if agreed.save or life.is_check_due:
                life.check_replicas()  # all ranks
            life.record()
            if agreed.save:
                life.save()
        life.complete_line(validate)  # all ranks: time ends a run before a step, not after one
        life.end()  # all ranks: the last state is on disk before any rank leaves


def warm_up(ddp: DDP, c: Config, world: World) -> None:
    """All ranks: one backward pass whose gradients are thrown away, before the state is loaded.

    DDP rebuilds its buckets after the first backward pass of a process. Without this one, the
    first real step of a new life would reduce in another order than the same step of an
    undisturbed run, and the losses of three ranks or more would differ in the last bits.
    """
    tokens = torch.zeros(1, c.seq_len, dtype=torch.long, device=world.device)
    with autocast(c, world.device):
        loss = ddp(tokens, tokens, tokens if c.mask == "document" else None)
    loss.backward()
    ddp.zero_grad(set_to_none=False)


def forward_backward(
    ddp: DDP, batch: Batch, targets: int, step: int, c: Config, world: World, sums: Sums
) -> float:
    """All ranks: the gradient of the step's mean loss over all its targets; the step's nats.

    Ranks may have different numbers of slots: only the last micro-batch of each synchronises, once.
    no_sync must be around the forward pass too, where DDP decides.
    """
    first_slot = lanes.owned(world.rank, world.world_size, c.lanes).start
    factor = sums.begin(targets)
    while True:  # a second time where a grid of the sums did not fit
        for part in of_step(batch, step, first_slot, c, world.device):
            if c.dropout:
                torch.manual_seed(part.seed(c, step))
            with nullcontext() if part.ends_step else ddp.no_sync():
                with autocast(c, world.device):
                    nats = ddp(part.x, part.y, part.positions)
                sums.took(part.slot, nats)
                (nats * factor).backward()
            if part.ends_slot and not part.ends_step:
                sums.close(part.slot)
        if (total := sums.finish()) is not None:  # all ranks
            return total


def main(args: Sequence[str] | None = None) -> int:
    """Parse, connect, train; the exit code, with one line instead of a traceback for a mistake."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(VisibleFormatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    stop = StopFlag()
    try:
        config = patiently(lambda: from_args(sys.argv[1:] if args is None else args))
        for name in ("data", "run_dir"):
            if not getattr(config, name):
                raise ConfigError(f"{flag(name)} is missing; see `gptddp train --help`")
        check_torch(TRAINER)
        listening = Listening(lambda where: stop.hung(where), lambda s: stop.silent(s))
        with listening, connect(config.device) as world:
            train(config, world, stop)
    except Stopped:
        return stop.exit_code  # rank 0 has said what was saved
    except Superseded as error:  # its peers, if it still has any, will start again with it
        log.error("gptddp train: %s", error)
        return error.exit_code
    except GptddpError as error:
        report(error)
        return error.exit_code
    except Exception as error:
        if is_lost_peer(error) or isinstance(error, LifeLost):
            what = "lost a peer: " if is_lost_peer(error) else ""
            reason = str(error).splitlines()[0]
            log.warning("[rank %s] %s%s", environment.ranks().rank, what, reason)
            return stop.exit_code if stop.asked else LifeLost.exit_code
        if final := crash_loop.early(error):
            report(final)
            return final.exit_code
        raise
    finally:
        stop.close()
    return 0


if __name__ == "__main__":
    run(main)
