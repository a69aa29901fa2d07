"""The gradient of a step does not depend on the number of processes, nor on how even they are."""

import os
import subprocess
import sys

import numpy as np
from support.paths import SUPPORT


def test_gradients_are_those_of_one_process(tmp_path):
    """1 to 7 processes over 8 lanes of 3 rows, one without a target: 1e-6 of the norm in fp32.

    Ranks run 2 to 12 micro-batches of up to 2 rows, some of which cross the border of two lanes.
    """
    environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    child = subprocess.run(
        [sys.executable, SUPPORT / "gradients.py", tmp_path],
        env=os.environ | environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    one, *others = [np.load(tmp_path / f"{world_size}.npy") for world_size in range(1, 8)]
    norm = np.linalg.norm(one)
    assert norm > 0.1
    for world_size, other in enumerate(others, 2):
        assert np.linalg.norm(other - one) <= 1e-6 * norm, f"{world_size} processes"
