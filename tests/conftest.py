"""Fixtures that are shared: a small real corpus."""

import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A prepared dataset: some files of the standard library, a vocabulary of 512."""
    folder = tmp_path_factory.mktemp("corpus")
    source = folder / "source"
    source.mkdir()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py")):
        (source / path.name).write_bytes(path.read_bytes())
    code = "from gptddp import main; main()"
    command = [sys.executable, "-c", code, "prepare", str(source), "--out", str(folder / "data")]
    subprocess.run([*command, "--vocab-size", "512"], check=True, capture_output=True)
    return folder / "data"


@pytest.fixture
def train_here(monkeypatch):
    """Train in this process: one thread, and pytest's signal handlers are put back."""
    monkeypatch.setattr("gptddp.dist.cpu_quota", lambda: 1)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
