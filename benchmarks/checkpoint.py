"""What a save costs the training: check and copy that it waits for, the commit that runs beside it.

    python benchmarks/checkpoint.py [--saves 5] [--folder DIR]

Steps of the model `tiny` alone and beside a save take turns, so that a noisy machine is noisy for
both. A save costs the hash by which the ranks are compared before, its copy, and what the steps
beside it take longer. The commit runs in a thread, as the trainer does it, or in a process of its
own, which needs the same copy in shared memory. The bars: the copy at 10 GB/s, beside what one
memmove of the same bytes takes here; all of it 1 % of the default interval of 60 s.
"""

import argparse
import ctypes
import mmap
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gptddp.checkpoint import retention, store
from gptddp.checkpoint.writer import Writer
from gptddp.config import Config, with_preset
from gptddp.distributed.replicas import check_replicas
from gptddp.model.gpt import build

INTERVAL_S, COPY_BYTES_S = 60.0, 10e9
QUIET = 8  # steps before each save
SIZES = {"13 MB": 13_000_000, "1.5 GB": 1_500_000_000}
ALONE: Any = SimpleNamespace(rank=0, world_size=1, all_reduce=lambda tensor: tensor)


class Steps:
    """Forward and backward passes of a small model, as training has them."""

    def __init__(self) -> None:
        config = with_preset(Config(preset="tiny", precision="fp32"), accelerator=False)
        self.net = build(config, 4096, torch.device("cpu"))
        self.tokens = torch.randint(4096, (4, config.seq_len or 256))

    def step(self) -> float:
        begin = time.perf_counter()
        self.net(self.tokens, self.tokens).backward()
        return time.perf_counter() - begin


class InThread:
    """The trainer's own writer."""

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.writer = Writer(folder, 1, keep=1)
        self.writer.prepare(tensors)

    def submit(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        self.writer.submit(step, tensors, {})

    @property
    def busy(self) -> bool:
        return self.writer.busy

    def close(self) -> None:
        self.writer.wait()


class InProcess:
    """The same commit in another process, from a copy in shared memory."""

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.file = tempfile.NamedTemporaryFile(dir="/dev/shm")  # noqa: SIM115
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self.file.truncate(nbytes)
        self.copy = torch.frombuffer(mmap.mmap(self.file.fileno(), nbytes), dtype=torch.float32)
        self.copy.zero_()
        command = [sys.executable, __file__, "--serve", self.file.name, "--folder", str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.process.stdout.readline()
        self._waits = False

    def submit(self, step: int, tensors: dict[str, torch.Tensor]) -> None:
        parts = self.copy.split([tensor.numel() for tensor in tensors.values()])
        for part, tensor in zip(parts, tensors.values(), strict=True):
            part.copy_(tensor)
        self.process.stdin.write(b"%d\n" % step)
        self.process.stdin.flush()
        self._waits = True

    @property
    def busy(self) -> bool:
        if self._waits and select.select([self.process.stdout], [], [], 0)[0]:
            self._waits = not self.process.stdout.readline()
        return self._waits

    def close(self) -> None:
        self.process.communicate()
        self.file.close()


def serve(path: str, folder: Path) -> None:
    """The process that commits what lies in shared memory."""
    with open(path, "r+b") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0))
    print(flush=True)
    for line in sys.stdin:
        manifest = {"step": int(line), "generation": 1, "time": time.time(), "meta": {}}
        store.commit(folder, {**manifest, "run_id": None, "tensors": {}}, data)
        retention.prune(folder, 1)
        print(flush=True)


def timed(work: Callable[..., Any], *args: Any) -> float:
    begin = time.perf_counter()
    work(*args)
    return time.perf_counter() - begin


def measure(
    saver: InThread | InProcess, steps: Steps, saves: int, tensors: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Medians over the saves, in seconds: each part, and what a save costs in all."""
    found: dict[str, list[float]] = defaultdict(list)
    flat = torch.zeros(2, sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
    places = [row.data_ptr() for row in flat]
    for number in range(1, saves + 1):
        found["memmove"].append(timed(ctypes.memmove, *places, flat.shape[1]))
        quiet = statistics.median(steps.step() for _ in range(QUIET))
        found["check"].append(timed(check_replicas, tensors, number, ALONE))
        begin = time.perf_counter()
        found["copy"].append(timed(saver.submit, number, tensors))
        beside = []
        while saver.busy:
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
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve(options.serve, options.folder)
    steps = Steps()
    for size in options.sizes:
        tensors = {str(n): torch.rand(SIZES[size] // 256) for n in range(64)}
        for kind in (InThread, InProcess):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                saver = kind(Path(folder), tensors)
                it = measure(saver, steps, options.saves, tensors)
                saver.close()
            print(
                f"{size:>6} {kind.__name__:9} check {it['check'] * 1e3:6.1f} ms; "
                f"copy {it['copy'] * 1e3:6.1f} ms, "
                f"{it['copy'] / (SIZES[size] / COPY_BYTES_S):4.2f} of the bar, "
                f"{it['copy'] / it['memmove']:4.2f} of a memmove; "
                f"commit {it['commit']:6.2f} s; cost {it['cost'] * 1e3:7.1f} ms, "
                f"{it['cost'] / INTERVAL_S:.2%} of the interval",
                flush=True,
            )


if __name__ == "__main__":
    main()
