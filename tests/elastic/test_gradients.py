"""The gradient of a step does not depend on the number of processes, nor on how even they are."""

import numpy as np
import pytest
from support import forked

RANK = "import sys; from support.gradients import rank_main; rank_main(sys.argv[1])"
WORLDS = (1, 2, 3, 5, 7)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The gradients of a step by how they are summed, in worlds of 1 to 7 processes."""
    folder = tmp_path_factory.mktemp("gradients")
    for world in WORLDS:
        forked.train(world, str(folder), code=RANK)
    return {
        reduce: [np.load(folder / f"{reduce}.{world}.npy") for world in WORLDS]
        for reduce in ("exact", "fast")
    }


def test_gradients_are_those_of_one_process(found):
    """1 to 7 processes over 8 lanes of 3 rows, one without a target: the same bits where sums are
    exact, else 1e-6 of the norm in fp32.

    Ranks run 2 to 16 micro-batches of 2 rows or 1.
    """
    one = found["exact"][0]
    norm = np.linalg.norm(one)
    assert norm > 0.1
    for world, exact, fast in zip(WORLDS, found["exact"], found["fast"], strict=True):
        assert exact.tobytes() == one.tobytes(), f"{world} processes"
        assert np.linalg.norm(fast - one) <= 1e-6 * norm, f"{world} processes"
