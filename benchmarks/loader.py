"""How much of a bare tokenising loop's speed is left in the loader, per CPU-second.

    python benchmarks/loader.py DATASET [--seq-len 1024] [--lanes 48] [--batch 480] [--rounds 3]

DATASET is a prepared dataset; use one with a vocabulary of 32768 and a few hundred megabytes. Both
loops run on the same documents, in turns, single-threaded; the ratio is what counts.
"""

import argparse
import statistics
import time

from gptddp.corpus import Dataset, open_dataset
from gptddp.loader import Loader


def bare_tokens_per_cpu_s(dataset: Dataset) -> float:
    """Tokens a CPU-second of `encode(document)` over every document, reading not counted."""
    encode, tokens, cpu_s = dataset.tokenizer().encoder(), 0, 0.0
    for group in dataset.row_groups("train"):
        documents = dataset.read(group)
        started = time.process_time()
        tokens += sum(len(encode(document)) for document in documents)
        cpu_s += time.process_time() - started
    return tokens / cpu_s


def loader_tokens_per_cpu_s(
    dataset: Dataset, args: argparse.Namespace
) -> tuple[float, list[float]]:
    """Targets a CPU-second over one epoch of every lane, and the seconds of each next() call.

    All CPU time of the process counts: reading, tokenising, packing, hashing, next() itself.
    """
    started = time.process_time()
    loader = Loader(
        dataset, lanes=args.lanes, batch=args.batch, seq_len=args.seq_len, seed=1, threads=1
    )
    targets = rows = 0
    calls_s = []
    while True:
        called = time.perf_counter()
        batch = loader.next()
        calls_s.append(time.perf_counter() - called - batch.wait_s)
        targets, rows = targets + batch.targets, rows + len(batch.tokens)
        if batch.cursors[:, 0].min() > 0:
            break
    loader.close()
    ahead = sum(lane.rows for lane in loader._lanes)  # made, but not taken
    cpu_s = time.process_time() - started
    return (targets + targets / rows * ahead) / cpu_s, calls_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dataset")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--lanes", type=int, default=48)
    parser.add_argument("--batch", type=int, default=480)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    dataset = open_dataset(args.dataset)
    ratios = []
    for _ in range(args.rounds):
        bare = bare_tokens_per_cpu_s(dataset)
        loader, calls_s = loader_tokens_per_cpu_s(dataset, args)
        ratios.append(loader / bare)
        print(
            f"bare {bare / 1e6:.2f}, loader {loader / 1e6:.2f} M tokens per CPU-second, "
            f"next() {statistics.median(calls_s) * 1e3:.3f} ms without waiting"
        )
    print(f"loader / bare: {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
