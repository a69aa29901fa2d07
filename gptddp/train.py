"""Train a GPT: one process, many on one machine, or many pods.

    python -m gptddp.train --data DATASET --run-dir RUN
    torchrun --nproc-per-node 2 -m gptddp.train --data DATASET --run-dir RUN
    gptddp-k8s submit --replicas 4 --local

Read it downwards: `main` parses and connects, `train` is one life of a run, from its newest
checkpoint through the loop to its last one.
"""

import functools
import logging
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

from gptddp.checkpoint.load import copy_into
from gptddp.config import Config, flag, from_args
from gptddp.data import lanes
from gptddp.data.cache import open_cache
from gptddp.data.dataset import open_dataset
from gptddp.data.loader import Batch, Loader, eval_rows
from gptddp.distributed import environment, peers
from gptddp.distributed.connect import World, connect
from gptddp.distributed.environment import place, pod, restarts
from gptddp.distributed.hardware import use_fast_fp32
from gptddp.distributed.process import run
from gptddp.distributed.replicas import CHECK_EVERY, check_replicas
from gptddp.distributed.report import report
from gptddp.errors import (
    ConfigError,
    Diverged,
    GptddpError,
    LostPeer,
    NonFiniteError,
    Stopped,
    Superseded,
)
from gptddp.model import optim
from gptddp.model.evaluate import evaluate
from gptddp.model.gpt import build
from gptddp.model.micro_batches import autocast, micro_batches
from gptddp.run import crash_loop
from gptddp.run.progress import Progress
from gptddp.training import quarantine
from gptddp.training.agree import agree
from gptddp.training.begin import begin
from gptddp.training.end import save_last
from gptddp.training.memory import Memory
from gptddp.training.metrics import PhaseClock
from gptddp.training.recorder import Recorder
from gptddp.training.stop import StopFlag

log = logging.getLogger("gptddp")

PEER_LOST = 1  # the exit code of a rank whose peer is gone or differs: torchrun starts it again


def train(config: Config, world: World, stop: StopFlag) -> None:
    """Train until the last step. Raises Stopped when a signal ends it earlier."""
    clock = PhaseClock()

    # before anything is written for a run that cannot be
    dataset = open_dataset(config.data, config.on_bad)
    tokenizer = dataset.tokenizer()
    for warning in dataset.warnings() if world.rank == 0 else ():
        log.warning("%s", warning)

    # -- the run: the newest state on the storage or in any rank's memory ------------------------
    start = begin(config, dataset, world)  # all ranks
    life, c = start.life, start.life.config
    progress = Progress.from_meta(life.meta)
    recorder = Recorder(life, start.lease, world, clock) if start.lease else None  # rank 0
    memory = Memory(start.place, life)
    stop.holds, stop.last_words = life.source == "memory", lambda: memory.leave(stop.cause)

    # -- the data: its threads read and pack while the model is built -----------------------------
    cache = open_cache(c.cache_dir)

    def open_loader() -> Loader:
        return Loader(
            dataset, lanes=c.lanes, batch=c.batch, seq_len=c.seq_len, seed=c.seed,
            rank=world.rank, world_size=world.world_size, state=progress.data or None,
            threads=min(8, torch.get_num_threads()), pack=c.pack, cache=cache,
        )  # fmt: skip

    @functools.cache
    def val_rows() -> tuple[np.ndarray, np.ndarray]:
        return eval_rows(dataset, c.seq_len, c.eval_tokens, c.pack)

    loader, since = open_loader(), time.monotonic()  # the second: the last step's end
    try:
        if not life.step:  # a mistake in them is told at once; a recovery must not wait for them
            val_rows()

        # -- the model, from the same seed on every rank ------------------------------------------
        if c.precision == "fp32":
            use_fast_fp32(world.device)
        net = build(c, tokenizer.vocab_size, world.device)
        optimizer = optim.build(net, c)
        ddp = DDP(net, gradient_as_bucket_view=True)
        warm_up(ddp, c, world)

        # -- its state ----------------------------------------------------------------------------
        clock.enter("restore")
        tensors = optim.state_tensors(net, optimizer)
        if start.tensors is not None:  # one rank only
            copy_into(tensors, start.tensors)
        if life.step:
            world.broadcast(tensors.values(), start.source)  # all ranks
        check_replicas(tensors, progress.step, world)  # all ranks
        memory.hold(tensors, progress)
        if recorder:
            recorder.begin(tensors, net.n_params(), progress, start.lines, start.fault)
        lines = {line["step"]: line for line in start.lines}
        line = life.line or lines.get(life.step, {})
        del start  # a memory that is still mapped would leave no room for the next

        def is_due() -> bool:
            return progress.step % c.eval_every == 0 or progress.step == c.steps

        def validate(line: dict[str, Any]) -> bool:
            """All ranks: evaluate the step of this line; False if a stop came between."""
            clock.enter("eval")
            result = evaluate(net, val_rows(), tokenizer, c, world, lambda: stop.asked)
            line |= dict(val_loss=result.loss, val_bpb=result.bpb) if result else {}
            return result is not None

        # -- the loop -----------------------------------------------------------------------------
        stop.holds, cause = True, "steps"
        if verdict := environment.verdict():
            crash_loop.forget(verdict.parent)
        if line and "val_loss" not in line and is_due():  # the life before did not come to it
            cause = cause if validate(line) else "stopped"
            if recorder and cause == "steps":
                recorder.evaluated(line)
        recent: deque[float] = deque(maxlen=64)  # seconds of steps
        while cause == "steps" and progress.step < c.steps:
            clock.enter("data_wait")
            batch = quarantine.next_batch(loader, c.on_bad, life.quarantine.get(progress.step, ()))
            clock.enter("step" if progress.step > life.step else "warmup")
            started = time.monotonic()
            out_of_time = 0 < c.max_time <= progress.train_s
            save = recorder.due() if recorder else False
            agreed = agree(batch, stop.asked, out_of_time, save, world)  # all ranks
            if agreed.stop or agreed.out_of_time:
                cause = "stopped" if agreed.stop else "max_time"
                break

            if agreed.bad:
                decision = quarantine.decide(batch, loader, progress, world)  # all ranks
                if recorder:
                    recorder.quarantine(decision, progress)
                loader.close()
                loader = open_loader()
                continue

            lr = optim.lr_at(progress.step, c)
            for group in optimizer.param_groups:
                group["lr"] = lr
            nats = forward_backward(ddp, batch, agreed.targets, progress.step, c, world)
            loss = world.all_reduce(nats).item() / agreed.targets  # all ranks
            norm = nn.utils.clip_grad_norm_(net.parameters(), c.grad_clip or math.inf).item()
            # The same on every rank, since both come out of a sum over all of them.
            finite = math.isfinite(loss) and math.isfinite(norm)
            memory.release()
            if finite:
                optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            step_s = time.monotonic() - started
            progress.advance(agreed, finite, step_s, loader.state(agreed.cursors))
            since = time.monotonic()
            recent.append(step_s)
            patience_s = 8 * statistics.median(recent)
            world.set_timeout(patience_s)

            line = dict(
                step=progress.step, loss=loss if finite else None,
                grad_norm=norm if finite else None, lr=lr, tokens=progress.tokens,
                tok_s=agreed.targets / (step_s + batch.wait_s), data_wait_s=batch.wait_s,
                batch_fp=f"{agreed.fp:016x}", chain_fp=f"{progress.chain_fp:016x}",
                world_size=world.world_size, time=time.time(),
            )  # fmt: skip
            memory.lines.append(line)
            memory.hold(tensors, progress)
            if is_due() and not validate(line):
                cause = "stopped"  # the next life evaluates this step
            clock.enter("other")
            if recorder:
                recorder.step(line, progress, step_s)
            if progress.skipped > c.max_skipped:
                raise NonFiniteError(
                    f"step {progress.step}: loss or gradient not finite {progress.skipped} times "
                    f"in a row (max_skipped is {c.max_skipped}): lower lr, or look at the data"
                )
            if agreed.save or progress.step % CHECK_EVERY == 0:
                clock.enter("checkpoint")
                check_replicas(tensors, progress.step, world)  # all ranks
                if agreed.save and recorder:
                    recorder.save(tensors, progress)

        # -- the end: the last state is on disk before any rank leaves ----------------------------
        clock.enter("checkpoint")
        check_replicas(tensors, progress.step, world)  # all ranks
        saved = save_last(recorder, memory, world, lambda: stop.asked, tensors, progress, cause)
        world.part()  # all ranks
        if cause == "stopped" or not saved:
            raise Stopped(f"{stop.cause} after step {progress.step}")
        memory.clear()
    except GptddpError:
        raise
    except Exception as error:
        if peers.is_lost_peer(error):  # no step is half done: its collectives come before it
            waited_s = time.monotonic() - since
            blame = f"after step {progress.step}: {peers.blame(error, world, waited_s)}"
            memory.leave(blame)
            raise LostPeer(blame) from error
        if isinstance(error, Diverged):
            memory.clear()
            if recorder:
                recorder.diverged(error, progress)
        elif final := crash_loop.final(
            error, Path(c.run_dir), step=progress.step + 1, generation=life.generation,
            rank=world.rank, pod=pod(),
        ):  # fmt: skip
            raise final from error
        raise
    finally:
        loader.close()
        if recorder:
            recorder.close()


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
    ddp: DDP, batch: Batch, targets: int, step: int, c: Config, world: World
) -> Tensor:
    """All ranks: the gradient of the step's mean loss over all its targets; this rank's nats.

    DDP divides the sum over ranks by their number, so each rank's sum is multiplied by it. Ranks
    may run different numbers of micro-batches: only the last of each synchronises, once. no_sync
    must be around the forward pass too, where DDP decides.
    """
    nats = torch.zeros((), dtype=torch.float64, device=world.device)
    last = (len(batch.tokens) - 1) // c.micro_batch
    first_lane = lanes.owned(world.rank, world.world_size, c.lanes).start
    parts = micro_batches(batch.tokens, batch.valid, batch.bos, c, world.device)
    for i, (x, y, positions) in enumerate(parts):
        if c.dropout:  # random numbers belong to the step and the lane, not to the process
            lane = first_lane + i * c.micro_batch * c.lanes // c.batch
            torch.manual_seed(lanes.key(c.seed, step, lane))
        with nullcontext() if i == last else ddp.no_sync():
            with autocast(c, world.device):
                loss = ddp(x, y, positions)
            (loss * (world.world_size / targets)).backward()
        nats += loss.detach()
    return nats


def main(args: Sequence[str] | None = None) -> int:
    """Parse, connect, train; the exit code, with one line instead of a traceback for a mistake."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    stop = StopFlag()
    try:
        config = from_args(sys.argv[1:] if args is None else args)
        for name in ("data", "run_dir"):
            if not getattr(config, name):
                raise ConfigError(f"{flag(name)} is missing; see `gptddp train --help`")
        with connect(config.device) as world:
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
        rank = place()[0]
        if peers.is_lost_peer(error) or isinstance(error, Diverged):
            what = "" if isinstance(error, Diverged) else "lost a peer: "
            log.warning("[rank %s] %s%s", rank, what, str(error).splitlines()[0])
            return stop.exit_code if stop.asked else PEER_LOST
        if (verdict := environment.verdict()) and (
            final := crash_loop.final(
                error, verdict.parent, step=0, generation=restarts(), rank=rank, pod=pod()
            )
        ):
            report(final)
            return final.exit_code
        raise
    finally:
        stop.close()
    return 0


if __name__ == "__main__":
    run(main)
