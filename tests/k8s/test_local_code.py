"""A local job's own code: pods of `submit --local` run it like pods of a cluster."""

import os
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from gptddp.k8s.cli.main import cli

# Replaces our launcher: writes which code it would train with, and needs no torch.
LAUNCHER = """
import os, sys, time
import mine
def main():
    runs = sys.argv[sys.argv.index("--run-dir") + 1]
    os.makedirs(runs, exist_ok=True)
    with open(runs + "/" + os.environ["POD_NAME"], "w") as file:
        print(mine.WORD, os.environ["GPTDDP_CODE"], mine.__file__, file=file)
    while len(os.listdir(runs)) < 2:  # the first pod that succeeds would end the other
        time.sleep(0.02)
    return 0
"""


@pytest.fixture
def submit(tmp_path, monkeypatch):
    """submit(word, nbytes): a local job whose own code has this word, and a file of this size."""
    data = tmp_path / "local/volumes/data"
    data.mkdir(parents=True)
    (data / "dataset.json").write_text("{}")
    own = tmp_path / "own"
    (own / "gptddp/launch").mkdir(parents=True)
    (own / "gptddp/launch/launcher.py").write_text(LAUNCHER)
    monkeypatch.chdir(tmp_path)  # this folder has another `mine`
    (tmp_path / "mine.py").write_text("raise SystemExit('the wrong one')")

    def run(word, nbytes=0):
        (own / "mine.py").write_text(f"WORD = {word!r}\n")
        (own / "table.py").write_text("#" + os.urandom(nbytes).hex())
        where = ["--local", "--local-dir", "local", "--replicas", "2", "--name", "job"]
        return CliRunner().invoke(cli, ["submit", *where, "--code", "own"])

    return run


@pytest.mark.parametrize("nbytes", [0, 800_000])
def test_every_pod_runs_own_code_in_its_own_folder(submit, tmp_path, nbytes):
    """Small and large code is unpacked in the pod's scratch space; the job names its hash."""
    result = submit("first", nbytes)
    assert result.exit_code == 0, result.output
    manifest = (tmp_path / "local/jobs/job/manifest.yaml").read_text()
    (digest,) = set(re.findall(r"/code/([0-9a-f]{64})\.tar\.gz", manifest))
    told = [
        (tmp_path / f"local/volumes/runs/job/job-worker-{i}").read_text().split() for i in (0, 1)
    ]
    assert {(word, code) for word, code, _ in told} == {("first", digest)}
    places = {Path(file) for _, _, file in told}
    assert len(places) == 2 and not any(place.exists() for place in places)


def test_a_sample_uses_the_jobs_own_code_and_run(submit, tmp_path, capfd):
    """A local `sample` runs the job's own code on the job's run, and returns its exit code."""
    load = tmp_path / "own/gptddp/inference/load_model.py"
    load.parent.mkdir(parents=True)
    load.write_text("def load(run, *_):\n    print('of', run)\n    raise SystemExit(7)\n")
    assert submit("first").exit_code == 0
    asked = ["--local", "--local-dir", "local", "--prompt", "a b"]
    assert CliRunner().invoke(cli, ["sample", "job", *asked]).exit_code == 7
    assert f"of {tmp_path}/local/volumes/runs/job\n" in capfd.readouterr().out
    refused = CliRunner().invoke(cli, ["sample", "job", *asked, "--image", "x"])
    assert refused.exit_code == 2 and "--image has no meaning with --local" in refused.stderr
