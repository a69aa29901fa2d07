"""The gradient of a step does not depend on the number of processes, nor on how even they are."""

import os
import subprocess
import sys

import numpy as np
import pytest
from support.paths import SUPPORT


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The gradients of a step by how they are summed, in worlds of 1 to 7 processes."""
    folder = tmp_path_factory.mktemp("gradients")
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, SUPPORT / "gradients.py", folder],
        env=os.environ | environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    return {
        reduce: [np.load(folder / f"{reduce}.{world_size}.npy") for world_size in range(1, 8)]
        for reduce in ("exact", "fast")
    }


def test_exact_gradients_have_the_same_bits_in_every_world(found):
    """1 to 7 processes over 8 lanes of 3 rows, of which one has no target."""
    one, *others = found["exact"]
    assert np.linalg.norm(one) > 0.1
    for world_size, other in enumerate(others, 2):
        assert one.tobytes() == other.tobytes(), f"{world_size} processes"


def test_gradients_are_those_of_one_process(found):
    """1 to 7 processes over 8 lanes of 3 rows, one without a target: 1e-6 of the norm in fp32.

    Ranks run 2 to 16 micro-batches of 2 rows or 1.
    """
    one = found["exact"][0]
    norm = np.linalg.norm(one)
    for reduce, worlds in found.items():
        for world_size, other in enumerate(worlds, 1):
            assert np.linalg.norm(other - one) <= 1e-6 * norm, (reduce, world_size)
