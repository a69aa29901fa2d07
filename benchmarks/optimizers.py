"""Muon against AdamW: how many tokens does each need to AdamW's best loss on `tiny`?

    python benchmarks/optimizers.py [--out .bench/optimizers] [--part 0.7] [--steps 400] [--seeds 3]

AdamW trains `--steps` of `--batch` rows, Muon a fraction `--part` of them, each with the same six
peak rates and seeds, the same data, batch and schedule, which ends with the run. Muon needs at most
that fraction of AdamW's tokens if its best mean loss is not higher than AdamW's best: the mean over
the seeds of the validation loss after the last step. Each optimizer has its best rate. A best rate
at an end of the grid proves nothing about its optimizer, and is reported.

The text is the Python source of the standard library. A run is one process with one thread; as many
run at a time as there are processors. The first seed runs with all rates, the others with the best
rates first, so that intermediate results are useful. A run is a row of `runs.jsonl` in `--out`;
finished runs are not repeated, and interrupted ones continue. It takes an hour on two cores;
`--steps 40 --seeds 1 --rates 3e-3,6e-3` is a quick check, and `--report` prints the results so far.
"""

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gptddp.distributed.hardware import cpu_quota
from gptddp.run.history import history

RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2, 2.4e-2, 4.8e-2)
VOCABULARY = 2048
LEFT_OUT = ("encodings", "pydoc_data", "site-packages", "dist-packages", "test", "tests")


@dataclass(frozen=True)
class Run:
    """The settings of a run."""

    optimizer: str
    lr: float
    seed: int
    steps: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.optimizer}-{self.lr:g}-{self.seed}-{self.steps}x{self.batch}"


Rows = Mapping[Run, Mapping[str, Any]]  # the results of the runs


def runs(args: argparse.Namespace, seed: int) -> list[Run]:
    """All runs of a seed."""
    lengths = {"adamw": args.steps, "muon": round(args.part * args.steps)}
    return [
        Run(optimizer, lr, seed, steps, args.batch)
        for lr in args.rates
        for optimizer, steps in lengths.items()
    ]


def prepare(out: Path) -> None:
    """Prepare the dataset, unless it exists."""
    command = [sys.executable, "-c", "from gptddp.cli import cli; cli()", "prepare"]
    command += [sysconfig.get_paths()["stdlib"], "--include", "*.py", "--out", str(out / "data")]
    command += [it for name in LEFT_OUT for it in ("--exclude", name)]
    subprocess.run([*command, "--vocab-size", str(VOCABULARY)], check=True)


def train(run: Run, out: Path) -> dict[str, Any]:
    """Do or continue a run; return its row."""
    folder, began = out / run.name, time.monotonic()
    command = [sys.executable, "-m", "gptddp.train", "--preset", "tiny", "--threads", "1"]
    command += ["--data", str(out / "data"), "--run-dir", str(folder), "--seed", str(run.seed)]
    command += ["--optimizer", run.optimizer, "--lr", str(run.lr), "--batch", str(run.batch)]
    command += ["--steps", str(run.steps), "--warmup-steps", str(run.steps // 10)]
    command += ["--eval-every", "100000", "--log-every", "100000"]
    with open(out / f"{run.name}.log", "ab") as log:
        subprocess.run(command, check=True, stderr=log, stdout=log)
    last = list(history(folder))[-1]
    found = {name: last[name] for name in ("tokens", "val_loss", "val_bpb")}
    return {**asdict(run), **found, "seconds": round(time.monotonic() - began, 1)}


def do(wanted: Iterable[Run], done: dict[Run, dict[str, Any]], out: Path) -> None:
    """Do the missing runs, as many at a time as there are processors."""
    with ThreadPoolExecutor(cpu_quota()) as pool:
        missing = {pool.submit(train, run, out): run for run in wanted if run not in done}
        for it in as_completed(missing):
            row = done[missing[it]] = it.result()
            with open(out / "runs.jsonl", "a") as file:
                file.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)


def from_the_best(first: Rows) -> Callable[[Run], tuple[int, int]]:
    """The order of the other seeds: by the distance of a rate from the first seed's best."""
    best: dict[str, Run] = {}
    for run in sorted(first, key=lambda run: first[run]["val_loss"]):
        best.setdefault(run.optimizer, run)
    rates = sorted({run.lr for run in first})
    return lambda run: (
        abs(rates.index(run.lr) - rates.index(best[run.optimizer].lr)),
        run.seed,
    )


def report(rows: Rows, args: argparse.Namespace) -> None:
    """The mean losses, the best of each optimizer, and whether the claim holds."""
    means: dict[str, dict[float, float]] = {}
    print(f"\n{'':8}{'steps':>6}{'lr':>10}  validation loss of each seed, mean")
    for optimizer, lr in sorted({(run.optimizer, run.lr) for run in rows}):
        of = sorted((it for it in rows if (it.optimizer, it.lr) == (optimizer, lr)), key=_seed)
        losses = [rows[it]["val_loss"] for it in of]
        each = " ".join(f"{loss:.4f}" for loss in losses)
        print(f"{optimizer:8}{of[0].steps:6}{lr:10.2e}  {each}  {statistics.mean(losses):.4f}")
        if len(losses) == args.seeds:  # a mean of fewer is not compared
            means.setdefault(optimizer, {})[lr] = statistics.mean(losses)
    for optimizer, of_rate in means.items():
        lr = min(of_rate, key=lambda lr: of_rate[lr])
        end = lr in (min(args.rates), max(args.rates))
        note = ", an end of the grid: a better rate may be outside it" if end else ""
        print(f"best of {optimizer}: {of_rate[lr]:.4f} at {lr:.2e}{note}")
    if len(means) == 2:
        holds = min(means["muon"].values()) <= min(means["adamw"].values())
        print(f"muon with {args.part:.2f} times the tokens is {'' if holds else 'not '}as good")


def _seed(run: Run) -> int:
    return run.seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(".bench/optimizers"))
    parser.add_argument("--part", type=float, default=0.7)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=12, help="rows per step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rates", default=",".join(f"{rate:g}" for rate in RATES))
    parser.add_argument("--report", action="store_true", help="only report finished runs")
    args = parser.parse_args()
    args.rates = [float(it) for it in args.rates.split(",")]
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "runs.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {Run(*(it[name] for name in Run.__dataclass_fields__)): it for it in lines}
    first = runs(args, seed=1)
    others = [run for seed in range(2, args.seeds + 1) for run in runs(args, seed)]
    if not args.report:
        prepare(args.out)
        do(first, done, args.out)
        do(sorted(others, key=from_the_best({run: done[run] for run in first})), done, args.out)
    report({run: done[run] for run in (*first, *others) if run in done}, args)


if __name__ == "__main__":
    main()
