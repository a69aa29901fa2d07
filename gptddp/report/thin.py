"""Fewer points of a long series, with every extreme of it."""

from collections.abc import Sequence

import numpy as np

MOST = 1000  # buckets of a series; two points of each are kept


def thin(values: Sequence[float], most: int = MOST) -> list[int]:
    """Which points to draw, by index, in order: of each bucket the least and the largest.

    Buckets have equally many points. The first and the last finite point of all are kept as well.
    NaN and infinity are left out, but where all points are drawn: there they are gaps of the line.
    """
    numbers = np.asarray(values, dtype=np.float64)
    finite = np.flatnonzero(np.isfinite(numbers))
    if len(numbers) <= 2 * most:
        return list(range(len(numbers))) if len(finite) else []
    kept = set(finite[[0, -1]].tolist()) if len(finite) else set()
    for bucket in np.array_split(finite, most):
        if len(bucket):
            of = numbers[bucket]
            kept |= {int(bucket[of.argmin()]), int(bucket[of.argmax()])}
    return sorted(kept)


def means(values: Sequence[float], most: int = MOST // 4) -> list[tuple[int, float]]:
    """The mean of each bucket, at the index in its middle; of a series that is thinned."""
    numbers = np.asarray(values, dtype=np.float64)
    finite = np.flatnonzero(np.isfinite(numbers))
    buckets = (it for it in np.array_split(finite, most) if len(it))
    return [(int(it[len(it) // 2]), float(numbers[it].mean())) for it in buckets]
