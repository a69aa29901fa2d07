"""How much of a bare tokenising loop's speed is left in the loader, per CPU-second.

    python benchmarks/loader.py DATASET [--seq-len 1024] [--lanes 48] [--batch 480] [--steps 100]

DATASET is a prepared dataset; use one with a vocabulary of 32768 and a few hundred megabytes. The
loader runs first, then the bare loop on the same row groups, in turns; the ratio is what counts.
"""

import argparse
import copy
import statistics
import time
from collections.abc import Sequence

from gptddp.corpus import Dataset, RowGroup, open_dataset
from gptddp.loader import Loader


def bare_tokens_per_cpu_s(dataset: Dataset, groups: Sequence[RowGroup]) -> float:
    """Tokens a CPU-second of `encode(document)` alone; reading is not counted."""
    encode, tokens, cpu_s = dataset.tokenizer().encoder(), 0, 0.0
    for group in groups:
        documents = dataset.read(group)
        started = time.process_time()
        tokens += sum(len(encode(document)) for document in documents)
        cpu_s += time.process_time() - started
    return tokens / cpu_s


def loader_tokens_per_cpu_s(
    dataset: Dataset, args: argparse.Namespace
) -> tuple[float, list[RowGroup], list[float]]:
    """Targets a CPU-second, the row groups that were read, and the seconds of each next() call.

    All CPU time of the process counts: reading, tokenising, packing, hashing, next() itself.
    """
    groups: list[RowGroup] = []

    def read(group: RowGroup) -> list[str]:
        groups.append(group)
        return dataset.read(group)

    recorded = copy.copy(dataset)
    recorded.read = read  # type: ignore[method-assign]
    started = time.process_time()
    loader = Loader(
        recorded, lanes=args.lanes, batch=args.batch, seq_len=args.seq_len, seed=1, threads=1
    )
    targets, calls_s = 0, []
    for _ in range(args.steps):
        called = time.perf_counter()
        batch = loader.next()
        calls_s.append(time.perf_counter() - called - batch.wait_s)
        targets += batch.targets
    loader.close()
    cpu_s = time.process_time() - started
    ahead = sum(lane.rows for lane in loader._lanes)  # made, but not taken
    return targets * (1 + ahead / (args.steps * args.batch)) / cpu_s, groups, calls_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--lanes", type=int, default=48)
    parser.add_argument("--batch", type=int, default=480)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    dataset = open_dataset(args.dataset)
    ratios = []
    for _ in range(args.rounds):
        loader, groups, calls_s = loader_tokens_per_cpu_s(dataset, args)
        bare = bare_tokens_per_cpu_s(dataset, groups)
        ratios.append(loader / bare)
        print(
            f"bare {bare / 1e6:.2f}, loader {loader / 1e6:.2f} M tokens per CPU-second, "
            f"next() {statistics.median(calls_s) * 1e3:.3f} ms without waiting"
        )
    print(f"loader / bare: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
