"""A run in this process, one life after the other."""

import pytest

from gptddp import train
from gptddp.flags import to_args


@pytest.fixture
def life(corpus, tmp_path, train_here):
    """life(fields): run one life with these fields, and return its exit code."""
    fixed = ["--data", str(corpus), "--run-dir", str(tmp_path / "run"), "--device", "cpu"]

    def live(**fields):
        return train.main([*fixed, "--cache-dir", "none", *to_args(fields)])

    return live
