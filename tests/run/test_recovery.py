"""The ledger has the end of each life."""

import json

from support.toy import SMALL
from support.trainer_patches import lose_a_peer

from gptddp.run import recovery
from gptddp.run.directory import log_path
from gptddp.run.history import read_ledger


def events(tmp_path, *kinds):
    return [event for event in read_ledger(tmp_path / "run") if event["event"] in kinds]


def test_a_lost_peer_is_in_the_ledger_with_its_seconds(run, tmp_path):
    """Rank 0 records the end of its life, and the next life does not record it again."""
    lose_a_peer(run, "--steps", "6")
    assert run("--steps", "6") == 0
    (end,) = events(tmp_path, "end")
    assert (end["generation"], end["step"]) == (1, 3)
    assert "Connection closed by peer" in end["cause"]
    assert end["survived"] and end["phases"] and end["since_s"] >= 0
    kinds = [event["event"] for event in read_ledger(tmp_path / "run")]
    assert kinds == ["start", "end", "start", "checkpoint", "stop"]


def test_an_end_after_redone_steps_has_the_newest_step(run, tmp_path):
    """The end does not have the highest step, which an earlier life logged and which was lost."""
    assert run("--steps", "2") == 0
    lose_a_peer(run, "--steps", "9", at=5)
    log = log_path(tmp_path / "run", 2)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(it | {"time": it["time"] - 3600}) + "\n" for it in lines))
    lose_a_peer(run, "--steps", "9", at=2)
    assert run("--steps", "9") == 0
    found = [(it["step"], it["time"] - it["at"] < 600) for it in events(tmp_path, "end")]
    assert found == [(6, True), (3, True)]


def test_a_life_without_survivors_has_an_end(corpus, tmp_path, forked):
    """After SIGKILL of the only process, the next life records that it was killed."""
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
        assert forked(code, *flags, last).wait(120) == code_wanted
    (end,) = events(tmp_path, "end")
    assert (end["step"], end["cause"]) == (3, recovery.UNKNOWN)


def test_a_log_that_ends_before_the_checkpoint_is_accepted(run, tmp_path):
    """The end of the previous life is recorded with its last known step."""
    assert run("--steps", "3") == 0
    for name, lines in (("log.1.jsonl", 2), ("ledger.jsonl", 1)):
        file = tmp_path / "run" / name
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:lines]))
    assert run("--steps", "5") == 0
    (end,) = events(tmp_path, "end")
    assert (end["generation"], end["step"], end["cause"]) == (1, 2, recovery.UNKNOWN)


def test_after_a_stop_no_other_end_is_recorded(run, tmp_path):
    """A run that is continued with more steps has no second end, and no invented cause."""
    assert run("--steps", "3") == 0
    assert run("--steps", "5") == 0
    assert not events(tmp_path, "end")
    assert [event["cause"] for event in events(tmp_path, "stop")] == ["steps", "steps"]
