"""Muon against AdamW: how many tokens does each need to AdamW's best loss on `tiny`?

    python benchmarks/optimizers.py [--out .bench/optimizers] [--part 0.7] [--steps 400] [--seeds 3]

AdamW trains `--steps`, Muon a `--part` of them, each with the same six peak rates and as many
seeds, the same data, batch and schedule, which ends where the run does. Muon needs at most that
part of AdamW's tokens if the best of its mean losses is no higher than the best of AdamW's: of
validation, after the last step, over the seeds. Each optimizer has the rate that suits it.

The text is the Python source of the standard library. A run is a row of `runs.jsonl` in `--out`;
those that are there are not done again, and one that was cut off goes on. All of it takes hours
(on two cores a run takes minutes); `--steps 40 --seeds 1 --rates 3e-3,6e-3` shows that it works.
"""

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptddp.distributed.hardware import cpu_quota
from gptddp.run.history import history

RATES = (7.5e-4, 1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2)
VOCABULARY = 4096
LEFT_OUT = ("encodings", "pydoc_data", "site-packages", "test", "tests")


@dataclass(frozen=True)
class Run:
    """What one row is of."""

    optimizer: str
    lr: float
    seed: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.optimizer}-{self.lr:g}-{self.seed}-{self.steps}"


def runs(rates: list[float], seeds: int, steps: int, part: float) -> Iterator[Run]:
    """Seed by seed, so that what there is so far can be looked at."""
    for seed in range(1, seeds + 1):
        for lr in rates:
            yield Run("adamw", lr, seed, steps)
            yield Run("muon", lr, seed, round(part * steps))


def prepare(out: Path) -> None:
    """The dataset, unless it is there."""
    command = [sys.executable, "-c", "from gptddp import main; main()", "prepare"]
    command += [sysconfig.get_paths()["stdlib"], "--include", "*.py", "--out", str(out / "data")]
    command += [it for name in LEFT_OUT for it in ("--exclude", name)]
    subprocess.run([*command, "--vocab-size", str(VOCABULARY)], check=True)


def train(run: Run, out: Path) -> dict[str, Any]:
    """The row of a run, which is done now, or gone on with."""
    folder, began = out / run.name, time.monotonic()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(cpu_quota()), "-m", "gptddp.train"]
    command += ["--preset", "tiny", "--data", str(out / "data"), "--run-dir", str(folder)]
    command += ["--optimizer", run.optimizer, "--lr", str(run.lr), "--seed", str(run.seed)]
    command += ["--steps", str(run.steps), "--warmup-steps", str(run.steps // 10)]
    command += ["--eval-every", "100000", "--log-every", "100000", "--threads", "1"]
    with open(out / f"{run.name}.log", "ab") as log:
        subprocess.run(command, check=True, stderr=log, stdout=log)
    last = list(history(folder))[-1]
    found = {name: last[name] for name in ("tokens", "val_loss", "val_bpb")}
    return {**vars(run), **found, "seconds": round(time.monotonic() - began, 1)}


def report(rows: list[Mapping[str, Any]], part: float) -> None:
    """The mean losses, the best of each optimizer, and whether the claim holds."""
    best: dict[str, tuple[float, float]] = {}
    print(f"\n{'':8}{'steps':>6}{'lr':>10}  validation loss of each seed, mean")
    for kind, lr, steps in dict.fromkeys((it["optimizer"], it["lr"], it["steps"]) for it in rows):
        of = [it for it in rows if (it["optimizer"], it["lr"]) == (kind, lr)]
        losses = [it["val_loss"] for it in of]
        mean = statistics.mean(losses)
        best[kind] = min(best.get(kind, (mean, lr)), (mean, lr))
        each = " ".join(f"{loss:.4f}" for loss in losses)
        print(f"{kind:8}{steps:6}{lr:10.2e}  {each}  {mean:.4f}")
    for kind, (loss, lr) in best.items():
        print(f"best of {kind}: {loss:.4f} at {lr:.2e}")
    if len(best) == 2:
        holds = best["muon"][0] <= best["adamw"][0]
        print(f"muon with {part:.2f} times the tokens is {'' if holds else 'not '}as good as adamw")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(".bench/optimizers"))
    parser.add_argument("--part", type=float, default=0.7)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", default=",".join(f"{rate:g}" for rate in RATES))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    prepare(args.out)
    path = args.out / "runs.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {Run(*(it[name] for name in ("optimizer", "lr", "seed", "steps"))): it for it in rows}
    wanted = list(
        runs([float(it) for it in args.rates.split(",")], args.seeds, args.steps, args.part)
    )
    for run in wanted:
        if run not in done:
            row = done[run] = train(run, args.out)
            with open(path, "a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
    report([done[run] for run in wanted], args.part)


if __name__ == "__main__":
    main()
