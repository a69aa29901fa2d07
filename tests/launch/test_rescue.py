"""A pod that is stopped while the world forms again saves what its worker has left in memory."""

import errno
import json
import shutil

import pytest
from support import ledgers
from support.failing_disk import Disk
from support.failing_volume import Reads
from support.trainer_patches import lose_a_peer

from gptddp import files
from gptddp.checkpoint import run_state, snapshot, store
from gptddp.checkpoint.writer import Writer
from gptddp.flags import from_args
from gptddp.launch import rescue as rescue_module
from gptddp.launch.rescue import rescue
from gptddp.run import lines
from gptddp.run.history import Ledger, RunLog, history, read_ledger
from gptddp.run.progress import FINGERPRINT


@pytest.fixture
def rescued(left, tmp_path):
    """rescued(): save what is left, as a launcher does that is stopped; the checkpoint's name."""
    return lambda: rescue(from_args(["--run-dir", str(left)]), tmp_path / "memory")


def test_what_is_left_becomes_a_checkpoint(run, left, rescued, tmp_path):
    """Once, with the log complete and the fingerprint of its bytes, which no worker had made before
    the fault; the next life goes on from it without the memory, and computes the same."""
    (path,) = (tmp_path / "memory").iterdir()
    assert "state_fp" not in snapshot.read(path).meta
    assert rescued() == "step-000000000003.1" and rescued() is None
    assert [line["step"] for line in history(left)] == [1, 2, 3]
    path.unlink()
    assert run("--steps", "6") == 0
    events = [it for it in read_ledger(left) if it["step"] == 3 and "state_fp" in it]
    assert [it["event"] for it in events] == ["checkpoint", "start"]
    assert (events[1]["source"], events[1]["redo"]) == ("step-000000000003.1", 0)
    manifest = store.read_manifest(left / "checkpoints/step-000000000003.1")
    prints = {events[0]["state_fp"], events[1]["state_fp"], manifest["meta"]["state_fp"]}
    assert len(prints) == 1 and FINGERPRINT.fullmatch(prints.pop())


def test_what_the_ledger_lacks_is_added(left, rescued, tmp_path):
    """The snapshot's events too: rank 0 was lost while the disk took nothing."""
    (path,) = (tmp_path / "memory").iterdir()
    found = snapshot.read(path)
    path.unlink()
    (start,) = read_ledger(left)
    lost = start | {"event": "end", "cause": "a peer is lost"}
    head = {name: getattr(found, name) for name in ("run_id", "generation", "meta", "lines")}
    snapshot.write(path, found.tensors, **head, fault=found.fault, events=[start, lost])
    assert rescued() == "step-000000000003.1"
    *before, saved = read_ledger(left)
    assert before == [start, lost] and saved["event"] == "checkpoint"


def test_a_state_that_a_later_life_has_gone_on_from_is_not_saved(run, left, rescued, tmp_path):
    """The run is that life's: neither while it trains nor when it has saved."""
    Ledger(left).event("start", 2)
    assert rescued() is None
    assert not list((left / "checkpoints").glob("step-*"))


def test_a_run_that_is_taken_during_the_save_is_left_alone(
    left, rescued, tmp_path, monkeypatch, caplog
):
    """The last look is before the checkpoint gets its name."""
    lease = left / "lease.json"

    def taken(lines):
        lease.write_text(json.dumps(json.loads(lease.read_text()) | {"owner": "another life"}))

    monkeypatch.setattr(RunLog, "sync", taken)
    assert rescued() is None and "a life that this pod was not in" in caplog.text
    assert not list((left / "checkpoints").glob("step-*"))


def test_the_state_of_another_run_is_not_saved(left, rescued):
    """The run directory was removed and made again under the same name, or nothing says its id."""
    ledgers.begun(left, run_state.read(left).config, run_id="other")
    assert rescued() is None
    (left / "ledger.jsonl").unlink()
    assert rescued() is None


def test_as_many_checkpoints_stay_as_the_run_keeps(left, rescued, monkeypatch):
    """Where `keep` is not given again."""
    (start, *events), kept = read_ledger(left), []
    ledgers.write(left, [start | {"config": start["config"] | {"keep": 7}}, *events])
    monkeypatch.setattr(
        rescue_module,
        "Writer",
        lambda *args, **how: kept.append(how["keep"]) or Writer(*args, **how),
    )
    assert rescued() == "step-000000000003.1" and kept == [7]


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
def test_a_volume_that_fails_meanwhile_loses_nothing(left, rescued, tmp_path, monkeypatch, code):
    """Each read before the commit is tried again; where it fails for longer, that is told."""
    monkeypatch.setattr(files, "RETRY_S", (0.0,))
    kept = shutil.copytree(left, tmp_path / "kept")
    reads = Reads(left, setattr=monkeypatch.setattr)
    with reads.failing(code):
        assert rescued() == "step-000000000003.1"
    before = [".tmp" in path for path in reads.seen].index(True)
    assert before > 10
    for at in range(before):
        shutil.rmtree(left)
        shutil.copytree(kept, left)
        with reads.failing(code, at=at):
            assert rescued() == "step-000000000003.1", reads.seen[at]
    shutil.rmtree(left)
    shutil.copytree(kept, left)
    with reads.failing(code, path=str(left / "ledger.jsonl")), pytest.raises(OSError):
        rescued()


def test_a_change_that_the_disk_has_not_taken_is_not_lost(run, pod, tmp_path, monkeypatch):
    """A life begins with another value while the disk is full, and its rank 0 is lost: what it has
    done becomes a checkpoint only with it, and a life that is given nothing goes on with it."""
    settle, path = lines.Lines.settle, tmp_path / "run"
    monkeypatch.setattr(lines.Lines, "settle", lambda it, s: settle(it, min(s, 0.05)))
    disk = Disk(path, monkeypatch.setattr)

    def values():
        config = run_state.configuration(path)
        return config.lr, config.grad_clip

    lose_a_peer(run, "--steps", "9", "--lr", "0.003", at=3)
    disk.turn("ENOSPC")
    lose_a_peer(run, "--steps", "9", "--lr", "0.001", "--grad-clip", "0.5", at=3)
    disk.turn(None)
    assert values() == (0.003, 1.0)
    saved = rescue(from_args(["--run-dir", str(path)]), tmp_path / "memory")
    assert saved == "step-000000000004.2" and values() == (0.001, 0.5)
    assert store.unsealed(path / "checkpoints" / saved)["config"]["lr"] == 0.001
    for file in (tmp_path / "memory").iterdir():
        file.unlink()
    assert run("--steps", "6") == 0 and values() == (0.001, 0.5)


def test_what_another_pod_is_saving_is_left_alone(left, rescued, tmp_path):
    """All pods save at once: a deletion would go on in a checkpoint that has just got its name."""
    other = left / "checkpoints/.tmp" / f"step-000000000003.1.{'ab' * 16}"
    other.mkdir(parents=True)
    assert rescued() == "step-000000000003.1"
    assert other.exists()


FINAL = """
import sys
from gptddp.launch.launcher import Launcher, Path, from_args
it = Launcher()
it.verdict, it.memory, it.config = Path(sys.argv[1]), Path(sys.argv[2]), from_args(sys.argv[3:])
it.main = lambda *_: it.raise_verdict()
from gptddp.launch import launcher
launcher.Launcher = lambda: it
sys.exit(launcher.main([]))
"""


@pytest.mark.parametrize("lives", [0, 2])
def test_a_final_error_saves_what_memory_has(run, left, tmp_path, forked, lives):
    """The next life is refused, at once or after others that were killed before their first step:
    the pods go, and the job that is mended goes on from where this one was."""
    about = {name: read_ledger(left)[0][name] for name in ("run_id", "config")}
    for life in range(lives):
        Ledger(left).event("start", 2 + life, source="memory", step=3, **about)
    assert run("--steps", "6", "--seed", "9") == 2
    verdict, where = tmp_path / "pod/verdict.json", ["--run-dir", str(left)]
    launcher = forked(FINAL, str(verdict), str(tmp_path / "memory"), *where)
    assert launcher.wait(60) == 2
    said = launcher.stderr.read().splitlines()
    assert "the newest state was in memory: checkpoint step-000000000003.1 is saved" in said[-2]
    assert "seed: 1337 -> 9" in said[-1]
    for file in (tmp_path / "memory").iterdir():
        file.unlink()
    assert run("--steps", "6") == 0
    starts = [event for event in read_ledger(left) if event["event"] == "start"]
    assert (starts[-1]["step"], starts[-1]["redo"]) == (3, 0)
