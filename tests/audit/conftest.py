"""An honest run to audit, and copies of it to forge."""

import shutil
from pathlib import Path

import pytest
from support.audits import trained


@pytest.fixture(scope="session")
def honest(corpus, tmp_path_factory):
    """A run of eight steps in two lives: it was extended once, with another learning rate."""
    run = trained(corpus, tmp_path_factory.mktemp("audit") / "run", "--steps", "5")
    return trained(corpus, run, "--lr", "1e-3")


@pytest.fixture
def forged(honest, tmp_path):
    """A copy of the honest run."""
    return Path(shutil.copytree(honest, tmp_path / "forged"))
