"""A run in this process, life after life."""

import pytest

from gptddp import train
from gptddp.flags import to_args


@pytest.fixture
def life(corpus, tmp_path, train_here):
    """life(fields): the exit code of a life of the run that is given these."""
    fixed = ["--data", str(corpus), "--run-dir", str(tmp_path / "run"), "--device", "cpu"]

    def live(**fields):
        return train.main([*fixed, "--cache-dir", "none", *to_args(fields)])

    return live
