"""Several ranks and jobs on the storage: damaged checkpoints, and a second job."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.forked import LAUNCH, ended, fork
from support.toy import SMALL
from support.waiting import until

from gptddp.checkpoint import store
from gptddp.run.history import history, read_ledger


def launch(corpus: Path, run: Path, steps: int) -> tuple[int, str]:
    """The container's entrypoint with three ranks, to its end: its exit code and stderr."""
    flags = [*SMALL, "--data", str(corpus), "--run-dir", str(run)]
    flags += ["--steps", str(steps), "--checkpoint-every", "0.05"]
    process = fork(LAUNCH, *flags, env=os.environ | {"PET_NPROC_PER_NODE": "3"})
    (said,) = ended([process], 0, 4)
    return process.returncode, said


def damage(run: Path, name: str) -> None:
    shard = run / "checkpoints" / name / "shard-0-of-1.bin"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)


def test_damaged_checkpoints_are_skipped_or_refused_by_three_ranks(corpus, tmp_path):
    """If the newest checkpoint is damaged, it is set aside, and the run uses the one before. If all
    are damaged, the exit code is 4, and no training begins."""
    run = tmp_path / "run"
    assert launch(corpus, run, 40)[0] == 0
    newest, before = store.names(run)[:2]
    damage(run, newest)
    code, err = launch(corpus, run, 44)
    assert code == 0, err
    assert f"checkpoint skipped: {newest}" in err and f"from {before}," in err
    assert f"{newest}.bad.1" in store.names(run)
    start = [event for event in read_ledger(run) if event["event"] == "start"][-1]
    assert start["source"] == before and start["world_size"] == 3
    lines = list(history(run))
    assert [line["step"] for line in lines] == list(range(1, 45))

    for name in filter(store.is_candidate, store.names(run)):
        damage(run, name)
    code, err = launch(corpus, run, 50)
    assert code == 4, err
    assert err.count("has checkpoints, but none is valid") == 1 and "Traceback" not in err
    assert list(history(run)) == lines and not (run / "lease.json").exists()


@pytest.fixture
def submit(corpus, tmp_path, spawn):
    """submit(folder) -> a local job of two pods; all of them share the volume `runs`."""

    def begin(folder: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from gptddp.k8s import main; main()", "submit", "--local"]
        command += ["--replicas", "2", "--local-dir", str(tmp_path / folder)]
        command += ["--volume", f"data={corpus}", "--volume", f"runs={tmp_path / 'runs'}"]
        command += ["--", *SMALL, "--steps", "100000", "--checkpoint-every", "0.5"]
        return spawn(command, stderr=subprocess.PIPE, text=True)  # its reaper ends the pods

    (tmp_path / "runs").mkdir()
    return begin


def test_two_jobs_of_one_manifest_on_one_run_directory(submit, tmp_path):
    """The second job is refused, with exit code 2 in its pods, although it has the name, manifest
    and rendezvous id of the first. The first continues without a new life, also after a kill."""
    run = tmp_path / "runs/gptddp"
    first = submit("one")
    until((run / "checkpoints").exists, why=first.poll)
    owner = json.loads((run / "lease.json").read_text())
    second = submit("two")
    assert second.wait(timeout=120) != 0
    err = second.stderr.read()
    assert "is in use by job gptddp-" in err and owner["job"] in err, err
    assert first.poll() is None
    assert json.loads((run / "lease.json").read_text()) == owner
    assert [event["event"] for event in read_ledger(run)].count("start") == 1

    status = json.loads((tmp_path / "one/jobs/gptddp/status.json").read_text())
    os.kill(status["pods"]["gptddp-worker-0"]["pid"], 9)
    until(lambda: [event for event in read_ledger(run) if event["event"] == "world"])
    assert first.poll() is None
    logs = "".join(path.read_text() for path in (tmp_path / "one/jobs/gptddp/logs").glob("*"))
    assert "waiting as long as" not in logs
