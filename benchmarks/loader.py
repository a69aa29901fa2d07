"""The loader's tokens per CPU-second, relative to a bare tokenising loop.

    python benchmarks/loader.py [DATASET] [--seq-len 1024] [--lanes 48] [--batch 480] [--steps 100]

DATASET is a prepared dataset; use one with a vocabulary of 32768 and a few hundred megabytes. By
default the Python source of this machine is prepared in `.bench` like the demo's dataset, but with
the packages: 168 MB with a vocabulary of 2048. In each round the loader runs first, then the bare
loop on the same row groups; the ratio matters. With --world-size W the first of W ranks runs too:
it should cost 1/W of the whole.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gptddp.data.dataset import Dataset, RowGroup, open_dataset
from gptddp.data.lanes import owned
from gptddp.data.loader import Loader
from gptddp.demo import prepare

DEMO = Path(".bench/volumes/data")  # soak.py uses it, too


@dataclass(frozen=True)
class Cost:
    tokens_per_cpu_s: float  # targets, and tokens that were packed ahead
    cpu_s_per_step: float
    groups: list[RowGroup]  # the row groups that were read
    call_s: float  # median of next(), without waiting


def bare_tokens_per_cpu_s(dataset: Dataset, groups: Sequence[RowGroup]) -> float:
    """Tokens per CPU-second of `encode(document)` alone; reading is not counted."""
    encode, tokens, cpu_s = dataset.tokenizer().encoder(), 0, 0.0
    for group in groups:
        documents = dataset.read(group)
        started = time.process_time()
        tokens += sum(len(encode(document)) for document in documents)
        cpu_s += time.process_time() - started
    return tokens / cpu_s


def loader_cost(dataset: Dataset, args: argparse.Namespace, world_size: int = 1) -> Cost:
    """All CPU time except loading the tokenizer: read, tokenise, pack, hash, next() itself."""
    groups: list[RowGroup] = []
    tokenizer = dataset.tokenizer()

    def read(group: RowGroup) -> list:
        groups.append(group)
        return dataset.read(group)

    recorded = copy.copy(dataset)
    recorded.read = read  # type: ignore[method-assign]
    recorded.tokenizer = lambda: tokenizer  # type: ignore[method-assign]
    started = time.process_time()
    loader = Loader(
        recorded,
        lanes=args.lanes,
        batch=args.batch,
        seq_len=args.seq_len,
        seed=1,
        threads=1,
        own=owned(0, world_size, args.lanes),
    )
    targets, rows, calls_s = 0, 0, []
    for _ in range(args.steps):
        called = time.perf_counter()
        batch = loader.next()
        calls_s.append(time.perf_counter() - called - batch.wait_s)
        targets, rows = targets + batch.targets, rows + len(batch.tokens)
    loader.close()
    cpu_s = time.process_time() - started
    ahead = sum(lane.rows for lane in loader._producer.lanes)  # packed, but not taken
    shared = loader._producer.source._shared.values()
    ahead += sum(map(len, shared)) // 2  # packed for two lanes; one has taken its part
    tokens_per_cpu_s = targets * (1 + ahead / rows) / cpu_s
    per_step = targets / args.steps / tokens_per_cpu_s
    return Cost(tokens_per_cpu_s, per_step, groups, statistics.median(calls_s))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset", nargs="?", type=Path)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--lanes", type=int, default=48)
    parser.add_argument("--batch", type=int, default=480)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--world-size", type=int, default=1)
    args = parser.parse_args()
    if args.dataset is None:
        prepare(DEMO, packages=True)
    dataset = open_dataset(args.dataset or DEMO)
    ratios, shares = [], []
    for _ in range(args.rounds):
        whole = loader_cost(dataset, args)
        bare = bare_tokens_per_cpu_s(dataset, whole.groups)
        ratios.append(whole.tokens_per_cpu_s / bare)
        print(
            f"bare {bare / 1e6:.2f}, loader {whole.tokens_per_cpu_s / 1e6:.2f} M tokens per "
            f"CPU-second, next() {whole.call_s * 1e3:.3f} ms without waiting"
        )
        if args.world_size > 1:
            rank = loader_cost(dataset, args, args.world_size)
            shares.append(rank.cpu_s_per_step / whole.cpu_s_per_step)
    print(f"loader / bare: {statistics.median(ratios):.3f}")
    if shares:
        print(f"a rank of {args.world_size} / one process: {statistics.median(shares):.3f}")


if __name__ == "__main__":
    main()
