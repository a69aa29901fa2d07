"""A GPT over the characters of a small text: mixed precision, clipping, weight decay, sampling.

    python examples/characters.py
    torchrun --standalone --nproc-per-node 2 examples/characters.py
    python examples/characters.py --sample "A checkpoint"

By default the text is this repository's documentation. Run it again to continue.
"""

import argparse
import math
import time
from pathlib import Path
from typing import Any

import flags
import snapshot
import torch
from char_model import PAGES, CharGPT, Text, Windows
from ddp import World, agree, connected, log, run, sum_over_ranks
from samplers import TrainSampler, test_share
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset

LENGTH = 64  # characters per row
CLIP = 1.0
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def parse(args: list[str] | None = None) -> argparse.Namespace:
    text = "Train a small GPT over characters by DDP."
    own = flags.parser(text, epochs=5, batch_size=16, lr=2e-3, save_every=50, folder="characters")
    own.add_argument("--text", type=Path, nargs="+", default=PAGES, help="files, in UTF-8")
    own.add_argument("--precision", choices=["auto", *DTYPES], default="auto")
    own.add_argument("--sample", metavar="TEXT", help="continue TEXT instead of training")
    return flags.parse(own, args)


def pick_precision(wanted: str, device: torch.device) -> str:
    """bf16 has the range of fp32; fp16, for GPUs without bf16, needs scaled gradients."""
    if wanted != "auto" or device.type == "cpu":
        return "fp32" if wanted == "auto" else wanted
    return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"


class Training:
    """The state of a run: saved in snapshots, and loaded to continue."""

    def __init__(self, args: argparse.Namespace, world: World) -> None:
        self.args, self.world, self.text = args, world, Text(args.text)
        given = {k: v for k, v in vars(args).items() if k not in ("folder", "device")}
        agree(given | {"text": self.text.sha256}, world)
        cut = len(self.text.ids) * 9 // 10  # the end is for testing: no random split
        self.train = Windows(self.text.ids[:cut], LENGTH)
        self.test = Windows(self.text.ids[cut:], LENGTH)
        self.sampler = TrainSampler(self.train, world, args.seed)
        on_gpu = world.device.type == "cuda"
        own = torch.Generator().manual_seed(args.seed)  # see digits.py
        self.loader = DataLoader(
            self.train, args.batch_size, sampler=self.sampler, pin_memory=on_gpu, generator=own
        )
        torch.manual_seed(args.seed)  # the same weights on every rank
        model = CharGPT(len(self.text.characters), LENGTH).to(world.device)
        torch.manual_seed(args.seed + 1 + world.rank)  # but each rank has its own dropout
        self.model = DistributedDataParallel(
            model, device_ids=[world.device.index] if on_gpu else None
        )
        matrices = [p for p in model.parameters() if p.ndim > 1]  # only these decay
        others = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others}]
        self.optimizer = torch.optim.AdamW(groups, args.lr, weight_decay=0.0)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / 20)
        )
        self.precision = pick_precision(args.precision, world.device)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=self.precision == "fp16")
        self.epoch, self.done, self.step = 0, 0, 0  # `done`: rows of this epoch, over all ranks
        names = ("seed", "batch_size", "lr")
        self.settings = {name: getattr(args, name) for name in names}
        self.settings |= {"precision": self.precision, "text": self.text.sha256}
        self.settings["script"] = "characters"

    def parts(self) -> dict[str, Any]:
        """The objects with a state. The scaler keeps its scale, so a start need not search it."""
        return {
            "model": self.model.module,
            "optimizer": self.optimizer,
            "schedule": self.schedule,
            "scaler": self.scaler,
        }

    def save(self) -> None:
        """All ranks: save a snapshot."""
        state = {name: part.state_dict() for name, part in self.parts().items()}
        state |= {"position": (self.epoch, self.done), "step": self.step}
        state["settings"] = self.settings
        snapshot.save(self.args.folder / "snapshot.pt", state, {}, self.world)

    def go_on(self) -> bool:
        """All ranks: continue from the newest snapshot; False: there is none."""
        state = snapshot.load(self.args.folder / "snapshot.pt", self.settings, self.world)
        if state is None:
            return False
        for name, part in self.parts().items():
            part.load_state_dict(state[name])
        (self.epoch, self.done), self.step = state["position"], state["step"]
        snapshot.own_of(state, self.world)
        log.info("continues in epoch %d, after %d rows", self.epoch, self.done)
        return True

    def losses(self, ids: torch.Tensor, targets: torch.Tensor, reduction: str) -> torch.Tensor:
        """Loss in nats per character, with logits in the chosen precision."""
        ids, targets = ids.to(self.world.device), targets.to(self.world.device)
        model = self.model if self.model.training else self.model.module
        lower = self.precision != "fp32"
        with torch.autocast(self.world.device.type, DTYPES[self.precision], enabled=lower):
            logits = model(ids)
        return functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), reduction=reduction
        )

    def train_step(self, ids: torch.Tensor, targets: torch.Tensor) -> float:
        """All ranks: one optimizer step; returns the gradient norm before clipping."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.losses(ids, targets, "mean")).backward()
        self.scaler.unscale_(self.optimizer)  # otherwise scaled gradients would be clipped
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP).item()
        # The gradients are averaged over all ranks, so all decide the same here.
        if not math.isfinite(norm) and not self.scaler.is_enabled():
            raise SystemExit(f"step {self.step}: the gradients are not finite; lower --lr")
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)  # does nothing if fp16 has overflowed
        self.scaler.update()
        if self.scaler.get_scale() >= before:
            self.schedule.step()
        self.step += 1
        return norm

    def train_epoch(self) -> None:
        """All ranks: train the rest of the epoch, and save a snapshot at the start of the next."""
        self.sampler.begin(self.epoch, self.done)
        began, before, norms = time.monotonic(), self.done, [0.0]
        for ids, targets in self.loader:
            norms.append(self.train_step(ids, targets))
            self.done += len(ids) * self.world.world_size
            if self.step % self.args.save_every == 0:
                self.save()  # all ranks
        speed = (self.done - before) * LENGTH / (time.monotonic() - began)
        loss = self.evaluate()
        norm = max(norm for norm in norms if math.isfinite(norm))
        log.info(
            "epoch %d  test loss %.3f (%.3f bits a character)  norm <= %.3f  %.0f characters/s",
            *(self.epoch, loss, loss / math.log(2), norm, speed),
        )
        self.epoch, self.done = self.epoch + 1, 0
        self.save()  # all ranks

    @torch.no_grad()
    def evaluate(self) -> float:
        """All ranks: nats per character over all test rows, each counted once."""
        self.model.eval()
        total, count = 0.0, 0
        mine = Subset(self.test, test_share(len(self.test), self.world))
        for ids, targets in DataLoader(mine, batch_size=64):
            total += self.losses(ids, targets, "sum").item()
            count += targets.numel()
        self.model.train()
        total, count = sum_over_ranks([total, count], self.world)  # all ranks
        return total / count


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    with connected(args.device) as world:
        job = Training(args, world)
        found = job.go_on()
        if args.sample is not None and not found:
            raise SystemExit(f"{args.folder} has no snapshot: train first, without --sample")
        while args.sample is None and job.epoch < args.epochs:
            job.train_epoch()
        if world.rank == 0:  # rank 0 only: the unwrapped model, without a collective
            start = job.text.encode(args.sample) if args.sample else job.text.ids[:4].tolist()
            print(job.text.decode(job.model.module.sample(start, 200, args.seed)))


if __name__ == "__main__":
    run(main)
