"""A run in this process, life after life."""

import pytest
from support.hf_folder import write_gpt2

from gptddp import train
from gptddp.flags import to_args


@pytest.fixture
def life(corpus, tmp_path, train_here):
    """life(fields): the exit code of a life of the run that is given these.

    With `init_sha256` among them, it is given the folder with those weights too.
    """
    fixed = ["--data", str(corpus), "--run-dir", str(tmp_path / "run"), "--device", "cpu"]

    def live(**fields):
        begun = {}
        if "init_sha256" in fields:
            begun["init_from"] = str(folder := tmp_path / "gpt2")
            folder.exists() or write_gpt2(folder, n_positions=16)
        return train.main([*fixed, "--cache-dir", "none", *to_args(fields | begun)])

    return live
