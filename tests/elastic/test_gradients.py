"""The gradient of a step does not depend on the number of processes, nor on how even they are."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch.distributed as td

WORLD_SIZES = 7


def test_gradients_are_those_of_one_process(tmp_path):
    """1 to 7 processes over 8 lanes of 3 rows, one without a target: 1e-6 of the norm in fp32.

    Ranks run 2 to 12 micro-batches of up to 2 rows, some of which cross the border of two lanes.
    """
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parents[1]), str(here.parent)])
    store = td.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [
        subprocess.Popen(
            [sys.executable, here / "gradients.py", tmp_path, str(rank), str(store.port)],
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(WORLD_SIZES)
    ]
    deadline = time.monotonic() + 150
    try:
        assert [rank.wait(deadline - time.monotonic()) for rank in ranks] == [0] * WORLD_SIZES
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    one = np.load(tmp_path / "1.npy")
    norm = np.linalg.norm(one)
    assert norm > 0.1
    for world_size in range(2, WORLD_SIZES + 1):
        other = np.load(tmp_path / f"{world_size}.npy")
        assert np.linalg.norm(other - one) <= 1e-6 * norm, world_size
