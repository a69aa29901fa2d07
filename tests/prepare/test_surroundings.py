"""Preparing and loading do not depend on place, machine and environment."""

import json
import os
import subprocess
import sys

import pytest
from numpy._core._multiarray_umath import __cpu_dispatch__

# Prepares a dataset of sys.argv[1] as sys.argv[2]; prints its hashes and batches' fingerprints.
CHILD = """
import json, locale, os, random, sys
from gptddp.data.dataset import open_dataset
from gptddp.data.loader import Loader
from gptddp.prepare.build import prepare
from gptddp.prepare.recipe import Settings
locale.setlocale(locale.LC_ALL, "")
source, out, threads, prefetch, shuffled = sys.argv[1:]
if shuffled == "shuffled":
    listdir = os.listdir
    os.listdir = lambda path: random.sample(names := listdir(path), len(names))
dataset = prepare([source], out, Settings(vocab_size=300))
found = [dataset.sha256, dataset.manifest["tokenizer"]["sha256"]]
loader = Loader(dataset, lanes=4, batch=8, seq_len=16, seed=7,
                threads=int(threads), prefetch=float(prefetch))
found += [f"{loader.next().fp:016x}" for _ in range(60)]
loader.close()
print(json.dumps(found))
"""


def outcome(source, out, *how, **environment):
    child = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, source, out, *how],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


@pytest.fixture
def usual(books, tmp_path):
    """The result in a common environment."""
    return outcome(books, tmp_path / "usual", "1", "1.5", "listed")


def test_another_environment_gives_the_same_result(usual, books, tmp_path):
    """Hash seed, locale, vector units, threads, prefetch, listing order and path do not matter."""
    place = tmp_path / "other é place"
    place.mkdir()
    books.rename(place / "books")
    environment = {
        "PYTHONHASHSEED": "3",
        "LC_ALL": "C",
        "PYTHONUTF8": "0",
        "PYTHONCOERCECLOCALE": "0",
        "NPY_DISABLE_CPU_FEATURES": " ".join(__cpu_dispatch__),
        "RAYON_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "3",
        "TZ": "Asia/Kathmandu",
        "ARROW_DEFAULT_MEMORY_POOL": "system",
    }
    found = outcome(place / "books", place / "data", "3", "4", "shuffled", **environment)
    assert found == usual and len(set(usual)) == 62
