"""Shared fixtures: texts, a small real corpus, runners of local jobs."""

import os
import secrets
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support.beside import beside_others
from support.paths import ROOT
from support.processes import ending, kill
from support.toy import SMALL, training_here


def pytest_configure():
    """Restore Ctrl-C: a shell makes its background jobs and their children ignore it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # waiting is not part of its time limit
def pytest_runtest_protocol(item):
    with beside_others(alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A prepared dataset: some files of the standard library, a vocabulary of 512."""
    folder = tmp_path_factory.mktemp("corpus")
    source = folder / "source"
    source.mkdir()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py")):
        (source / path.name).write_bytes(path.read_bytes())
    code = "from gptddp.cli import cli; cli()"
    command = [sys.executable, "-c", code, "prepare", str(source), "--out", str(folder / "data")]
    subprocess.run([*command, "--vocab-size", "512"], check=True, capture_output=True)
    return folder / "data"


@pytest.fixture
def books(tmp_path: Path) -> Path:
    """A folder of forty small documents, some of them in a subfolder."""
    folder = tmp_path / "books"
    (folder / "more").mkdir(parents=True)
    for n in range(40):
        path = folder / ("more" if n % 3 else "") / f"{n}.txt"
        path.write_text(f"book {n}: once upon a time\n" * (n + 1), "utf-8")
    return folder


@pytest.fixture
def train_here():
    """Train in this process: one thread, and pytest's signal handlers are put back."""
    with training_here():
        yield


@pytest.fixture
def run(corpus, tmp_path, train_here):
    """run(*flags): train in this process; the run directory is tmp_path / "run"."""
    from gptddp import train

    fixed = [*SMALL, "--data", str(corpus), "--run-dir", str(tmp_path / "run")]
    return lambda *flags: train.main([*fixed, *flags])


@pytest.fixture
def spawn():
    """subprocess.Popen; none of its processes outlives the test."""
    yield from ending(subprocess.Popen, kill)


@pytest.fixture
def forked():
    """support.forked.fork; none of its processes outlives the test."""
    from support.forked import fork

    yield from ending(fork, kill)


@pytest.fixture
def start(tmp_path):
    """Start a runner as a separate process; leftover processes are killed at the end."""
    from support.local_jobs import RUN

    from gptddp.k8s.local import reaper
    from gptddp.k8s.render import manifest

    def begin(built, *flags, folder=tmp_path / "local"):
        path = tmp_path / f"{secrets.token_hex(4)}.yaml"
        path.write_text(manifest.to_yaml([built]))
        command = [sys.executable, "-c", RUN, str(path), str(folder), *flags]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        return subprocess.Popen(
            command, env=environment, text=True, start_new_session=True, **pipes
        )

    yield from ending(begin, kill)
    reaper.sweep(str(tmp_path))


@pytest.fixture
def finish(start):
    """Run a job to its end: (exit code, stdout, stderr)."""

    def run(built, *flags, **where):
        process = start(built, *flags, **where)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err

    return run
