"""The ledger says how each life ended, and where the seconds of a recovery went."""

import json
import os
import subprocess
import sys

import pytest
from support.toy import SMALL
from support.trainer_patches import lose_a_peer

from gptddp.run import recovery
from gptddp.run.directory import log_path
from gptddp.run.history import history, newest_line, read_ledger


def events(tmp_path, *kinds):
    return [event for event in read_ledger(tmp_path / "run") if event["event"] in kinds]


def test_a_lost_peer_is_in_the_ledger_with_its_seconds(run, tmp_path):
    """Rank 0 records the end of its life, and the next one the parts that add up to the whole."""
    lose_a_peer(run, "--steps", "6")
    assert run("--steps", "6") == 0
    (end,) = events(tmp_path, "end")
    assert (end["generation"], end["step"]) == (1, 3)
    assert "Connection closed by peer" in end["cause"]
    assert end["survived"] and end["phases"] and end["since_s"] >= 0
    (recovered,) = events(tmp_path, "recovered")
    assert (recovered["generation"], recovered["step"]) == (2, 1)
    parts = [recovered[f"{name}_s"] for name in ("reform", "reload", "first_step")]
    assert all(part >= 0 for part in parts)
    assert sum(parts) == pytest.approx(recovered["total_s"], abs=0.01)
    last, first = (newest_line(tmp_path / "run", 1), next(history(tmp_path / "run")))
    assert recovered["total_s"] == pytest.approx(first["time"] - last["time"], abs=0.01)
    kinds = [event["event"] for event in read_ledger(tmp_path / "run")]
    assert kinds == ["start", "end", "start", "recovered", "checkpoint", "stop"]


def test_a_recovery_after_redone_steps_counts_from_the_newest_step(run, tmp_path):
    """Not from the highest one, which a life before has logged an hour ago and nobody has kept."""
    assert run("--steps", "2") == 0
    lose_a_peer(run, "--steps", "9", at=5)
    log = log_path(tmp_path / "run", 2)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(it | {"time": it["time"] - 3600}) + "\n" for it in lines))
    lose_a_peer(run, "--steps", "9", at=2)
    assert run("--steps", "9") == 0
    found = [(it["generation"], it["step"], it["total_s"]) for it in events(tmp_path, "recovered")]
    assert [it[:2] for it in found[1:]] == [(3, 3), (4, 3)]
    assert found[1][2] > 3000 and found[2][2] < 600
    assert [event["step"] for event in events(tmp_path, "end")] == [6, 3]


def test_a_life_that_nobody_survived_has_an_end_too(corpus, tmp_path):
    """SIGKILL of the only process: the next life says that no word was left."""
    code = (
        "import itertools, os, signal, sys\n"
        "from gptddp import train\n"
        "from gptddp.training import life\n"
        "agree, calls = life.agree, itertools.count(1)\n"
        "def killed(*args):\n"
        "    if next(calls) == 4 and sys.argv.pop() == 'kill':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return agree(*args)\n"
        "life.agree = killed\n"
        "sys.exit(train.main(sys.argv[1:-1]))\n"
    )
    flags = [*SMALL, "--data", str(corpus), "--run-dir", str(tmp_path / "run"), "--steps", "6"]
    for last, code_wanted in (("kill", -9), ("live", 0)):
        done = subprocess.run([sys.executable, "-c", code, *flags, last], env=os.environ)
        assert done.returncode == code_wanted
    (end,) = events(tmp_path, "end")
    assert (end["step"], end["cause"]) == (3, recovery.UNKNOWN)
    (recovered,) = events(tmp_path, "recovered")
    assert recovered["step"] == 1 and recovered["reform_s"] > 0


@pytest.mark.parametrize(
    ("times", "parts"),
    [
        ((100, 105, 106, 107), [5, 1, 1]),
        ((100, 3705, 3706, 107), [7, 0, 0]),  # rank 0's jumped ahead, and back
        ((100, -3495, -3494, -3493), [0, 0, 0]),  # or back
    ],
)
def test_clocks_that_differ_make_no_part_negative(times, parts):
    """Nor the sum of the parts another than the whole."""
    done, joined, ready, first = times
    last = recovery.Last(1, 3, done, "lost")
    found = recovery.seconds(last, joined, ready, first)
    assert found.pop("total_s") == sum(parts) == max(0, first - done)
    assert [*found.values()] == parts


def test_a_log_that_ends_before_the_checkpoint_is_no_obstacle(run, tmp_path):
    """The end of the life before is recorded with the last step that is known of it."""
    assert run("--steps", "3") == 0
    for name, lines in (("log.1.jsonl", 2), ("ledger.jsonl", 1)):
        file = tmp_path / "run" / name
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:lines]))
    assert run("--steps", "5") == 0
    (end,) = events(tmp_path, "end")
    assert (end["generation"], end["step"], end["cause"]) == (1, 2, recovery.UNKNOWN)


def test_a_stop_is_an_end_in_itself(run, tmp_path):
    """A run that is continued with more steps: no second end, and no cause is made up."""
    assert run("--steps", "3") == 0
    assert run("--steps", "5") == 0
    assert not events(tmp_path, "end")
    assert [event["cause"] for event in events(tmp_path, "stop")] == ["steps", "steps"]
    assert len(events(tmp_path, "recovered")) == 1
