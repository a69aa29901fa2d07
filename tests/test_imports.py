"""What each half of the package may load: the control plane is fast, the trainer is lean."""

import subprocess
import sys

import pytest


def loaded(code: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after `code`."""
    code += "\nimport sys; print(*{m.split('.')[0] for m in sys.modules})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split("\n")[-2].split())


HEAVY = {"torch", "numpy", "pyarrow", "prometheus_client"}


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import gptddp.k8s.cli.main", HEAVY | {"kubernetes"}),
        ("import gptddp.cli", HEAVY | {"kubernetes", "yaml"}),
        ("import gptddp.config, gptddp.errors, gptddp.files", HEAVY | {"click", "yaml"}),
        ("import gptddp.train", {"click", "yaml", "kubernetes"}),
    ],
)
def test_an_import_loads_no_more_than_it_may(code, forbidden):
    """A fresh interpreter shows none of the forbidden packages after the import."""
    assert not loaded(code) & forbidden
