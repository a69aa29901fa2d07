"""Handwritten digits with a small CNN: the same script on one process, several, and several nodes.

    python examples/digits.py
    torchrun --standalone --nproc-per-node 2 examples/digits.py

Run it again to continue: with a larger --epochs, or after a kill.
"""

import argparse
import csv
import io
import math
import time
from pathlib import Path
from typing import Any

import flags
import snapshot
import torch
from ddp import World, agree, connected, log, run, sum_over_ranks, sync_batch_norm
from digit_images import build, datasets, evaluate
from samplers import TrainSampler
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

COLUMNS = ("epoch", "lr", "train_loss", "test_loss", "test_accuracy", "tested", "samples_per_s")


def parse(args: list[str] | None = None) -> argparse.Namespace:
    text = "Train a small CNN on handwritten digits by DDP."
    own = flags.parser(text, epochs=10, batch_size=32, lr=0.05, save_every=10, folder="digits")
    return flags.parse(own, args)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    """Rank 0 only: write all rows again, so that a repeated epoch has one row."""
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS)
    table.writeheader()
    table.writerows(rows)
    with snapshot.replaced(path) as file:
        file.write(text.getvalue().encode())


class Training:
    """The state of a run: saved in snapshots, and loaded to continue."""

    def __init__(self, args: argparse.Namespace, world: World) -> None:
        self.args, self.world = args, world
        agree({k: v for k, v in vars(args).items() if k not in ("folder", "device")}, world)
        self.train, self.test = datasets(args.seed)
        self.sampler = TrainSampler(self.train, world, args.seed)
        pin = world.device.type == "cuda"
        # A separate generator: otherwise each new pass over the loader would draw from the global
        # one, and a run that continues within an epoch makes one more pass.
        own = torch.Generator().manual_seed(args.seed)
        self.loader = DataLoader(
            self.train, args.batch_size, sampler=self.sampler, pin_memory=pin, generator=own
        )
        torch.manual_seed(args.seed)  # the same weights on every rank
        model = sync_batch_norm(build().to(world.device), world, args.batch_size)
        torch.manual_seed(args.seed + 1 + world.rank)  # from here each rank has its own numbers
        on_gpu = [world.device.index] if pin else None
        self.model = DistributedDataParallel(model, device_ids=on_gpu)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4
        )
        self.schedule = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [6, 8], gamma=0.1)
        self.epoch, self.step = 0, 0
        self.done = 0  # samples of this epoch, over all ranks
        self.rows: list[dict[str, Any]] = []
        self.best, self.best_model = -1.0, self.model.module.state_dict()
        self.loss, self.samples = 0.0, 0  # of this rank, in this epoch
        self.settings = {"script": "digits", "seed": args.seed}
        self.settings |= {"batch_size": args.batch_size, "lr": args.lr}

    def save(self) -> None:
        """All ranks: save a snapshot. The model is unwrapped: names have no `module.` prefix."""
        state = {
            "position": (self.epoch, self.done),
            "step": self.step,
            "settings": self.settings,
            "model": self.model.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "rows": self.rows,
            "best": self.best,
            "best_model": self.best_model,
        }
        own = {"loss": self.loss, "samples": self.samples}
        snapshot.save(self.args.folder / "snapshot.pt", state, own, self.world)

    def go_on(self) -> None:
        """All ranks: continue from the newest snapshot, if there is one."""
        state = snapshot.load(self.args.folder / "snapshot.pt", self.settings, self.world)
        if state is None:
            return
        self.epoch, self.done = state["position"]
        self.step = state["step"]
        self.model.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.rows, self.best = state["rows"], state["best"]
        self.best_model = state["best_model"]
        self.leave()
        own = snapshot.own_of(state, self.world)
        self.loss, self.samples = own["loss"], own["samples"]
        log.info("continues in epoch %d, after %d samples", self.epoch, self.done)

    def leave(self) -> None:
        """Write the results of the run from the snapshot's state: rank 0 may be on another disk
        than before, or may have been killed when these files were ahead of the snapshot."""
        if self.world.rank == 0 and self.rows:  # rank 0 only; no collective in here
            snapshot.write(self.args.folder / "best.pt", self.best_model)
            write_csv(self.args.folder / "results.csv", self.rows)

    def train_epoch(self) -> float:
        """All ranks: train the rest of the epoch; returns samples per second over all ranks."""
        self.sampler.begin(self.epoch, self.done)  # each epoch has another order
        began, before = time.monotonic(), self.done
        for images, labels in self.loader:
            images = images.to(self.world.device, non_blocking=True)
            labels = labels.to(self.world.device, non_blocking=True)
            loss = functional.cross_entropy(self.model(images), labels)
            self.optimizer.zero_grad()
            loss.backward()  # meanwhile DDP averages the gradients over all ranks
            norm = nn.utils.get_total_norm(p.grad for p in self.model.parameters())
            if not math.isfinite(norm):  # equal on all ranks, so all stop before they save it
                raise SystemExit(f"step {self.step}: the gradients are not finite; lower --lr")
            self.optimizer.step()
            self.loss += loss.item() * len(labels)
            self.samples += len(labels)
            self.done += len(labels) * self.world.world_size
            self.step += 1
            if self.step % self.args.save_every == 0:
                self.save()  # all ranks
        return (self.done - before) / (time.monotonic() - began)

    def end_epoch(self, speed: float) -> None:
        """All ranks: test, keep the best, and save a snapshot at the start of the *next* epoch."""
        lr = self.schedule.get_last_lr()[0]
        self.schedule.step()
        loss, samples = sum_over_ranks([self.loss, self.samples], self.world)  # all ranks
        test_loss, accuracy, tested = evaluate(self.model.module, self.test, self.world)
        values = (self.epoch, lr, loss / samples, test_loss, accuracy, tested, round(speed))
        self.rows.append(dict(zip(COLUMNS, values, strict=True)))
        log.info(
            "epoch %d  loss %.4f  test loss %.4f  accuracy %.4f of %d  %.0f samples/s",
            *(self.epoch, loss / samples, test_loss, accuracy, tested, speed),
        )
        self.epoch, self.done = self.epoch + 1, 0
        self.loss, self.samples = 0.0, 0
        if accuracy > self.best:  # computed over all ranks, so all ranks agree
            self.best, now = accuracy, self.model.module.state_dict()
            self.best_model = {name: tensor.clone() for name, tensor in now.items()}
        self.leave()
        self.save()  # all ranks


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    with connected(args.device) as world:
        job = Training(args, world)
        job.go_on()
        while job.epoch < args.epochs:
            job.end_epoch(job.train_epoch())
        loss, accuracy, tested = evaluate(job.model.module, job.test, world)
        log.info("in the end  test loss %.4f  accuracy %.4f of %d", loss, accuracy, tested)


if __name__ == "__main__":
    run(main)
