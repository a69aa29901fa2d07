"""The cost of a save for the training: check and copy, which it waits for, and commit, beside it.

    python benchmarks/checkpoint.py [--saves 5] [--folder DIR]

Steps of the model `tiny` alone and beside a save alternate, so that a noisy machine affects both. A
save costs the hash that compares the ranks before it, its copy, and the slowdown of the steps
beside it. Targets: the copy at 10 GB/s, compared with one memmove of the same bytes on this
machine; the total at 1 % of the default interval of 60 s.
"""

import argparse
import ctypes
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gptddp.checkpoint.writer import Writer
from gptddp.config import Config, with_preset
from gptddp.distributed.replicas import check_replicas
from gptddp.model.gpt import build

INTERVAL_S, COPY_BYTES_S = 60.0, 10e9
QUIET = 8  # steps before each save
SIZES = {"13 MB": 13_000_000, "1.5 GB": 1_500_000_000}
ALONE: Any = SimpleNamespace(rank=0, world_size=1, all_reduce=lambda tensor: tensor)


class Steps:
    """Forward and backward passes of a small model, as in training."""

    def __init__(self) -> None:
        config = with_preset(Config(preset="tiny", precision="fp32"), accelerator=False)
        self.net = build(config, 4096, torch.device("cpu"))
        self.tokens = torch.randint(4096, (4, config.seq_len or 256))

    def step(self) -> float:
        begin = time.perf_counter()
        self.net(self.tokens, self.tokens).backward()
        return time.perf_counter() - begin


def timed(work: Callable[..., Any], *args: Any) -> float:
    begin = time.perf_counter()
    work(*args)
    return time.perf_counter() - begin


def measure(
    writer: Writer, steps: Steps, saves: int, tensors: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Medians over the saves, in seconds: each part, and the total cost of a save."""
    found: dict[str, list[float]] = defaultdict(list)
    flat = torch.zeros(2, sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    places = [row.data_ptr() for row in flat]
    for number in range(1, saves + 1):
        found["memmove"].append(timed(ctypes.memmove, *places, flat.shape[1]))
        quiet = statistics.median(steps.step() for _ in range(QUIET))
        found["check"].append(timed(check_replicas, tensors, number, ALONE))
        begin = time.perf_counter()
        found["copy"].append(timed(writer.submit, number, tensors, {}))
        beside = []
        while writer.busy:
            beside.append(steps.step())
        found["commit"].append(time.perf_counter() - begin - found["copy"][-1])
        waited = found["check"][-1] + found["copy"][-1]
        found["cost"].append(waited + sum(beside) - len(beside) * quiet)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the volume to measure; a temporary one")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=SIZES)
    options = parser.parse_args()
    steps = Steps()
    for size in options.sizes:
        tensors = {str(n): torch.rand(SIZES[size] // 256) for n in range(64)}
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            writer = Writer(Path(folder), 1, keep=1)
            writer.prepare(tensors)
            it = measure(writer, steps, options.saves, tensors)
            writer.wait()
        print(
            f"{size:>6} check {it['check'] * 1e3:6.1f} ms; "
            f"copy {it['copy'] * 1e3:6.1f} ms, "
            f"{it['copy'] / (SIZES[size] / COPY_BYTES_S):4.2f} of the bar, "
            f"{it['copy'] / it['memmove']:4.2f} of a memmove; "
            f"commit {it['commit']:6.2f} s; cost {it['cost'] * 1e3:7.1f} ms, "
            f"{it['cost'] / INTERVAL_S:.2%} of the interval",
            flush=True,
        )


if __name__ == "__main__":
    main()
