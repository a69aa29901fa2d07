"""An incomplete log, or one with lines of another run, is reported when it is printed or
compared."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from gptddp.cli import cli
from gptddp.run import history
from gptddp.run.progress import fold

STEPS = 40


def chain(seed: int) -> list[tuple[str, str]]:
    """batch_fp and chain_fp of each step, from 0."""
    found, now = [("", "0" * 16)], 0
    for step in range(1, STEPS + 1):
        now = fold(now, seed * 1000 + step)
        found.append((f"{seed * 1000 + step:016x}", f"{now:016x}"))
    return found


OURS, THEIRS = chain(1), chain(2)


def lines(steps, of=OURS) -> str:
    made = [dict(step=s, batch_fp=of[s][0], chain_fp=of[s][1], time=1.0) for s in steps]
    return "".join(json.dumps(line) + "\n" for line in made)


def event(name: str, generation: int, step: int, of=OURS, **more) -> str:
    fixed = {"event": name, "time": 1.0, "generation": generation, "step": step}
    return json.dumps(fixed | {"chain_fp": of[step][1]} | more) + "\n"


@pytest.fixture
def run(tmp_path) -> Path:
    """Four lives: to step 12, from 10 to 20, from 20 to 30, from 30 by memory to 40."""
    begins, ends = (0, 10, 20, 30), (12, 20, 30, 40)
    ledger = ""
    for life, (begin, end) in enumerate(zip(begins, ends, strict=True), 1):
        (tmp_path / f"log.{life}.jsonl").write_text(lines(range(begin + 1, end + 1)))
        ledger += event("start", life, begin) + event("checkpoint", life, end - end % 10)
    (tmp_path / "ledger.jsonl").write_text(ledger + event("stop", 4, 40))
    return tmp_path


def said(run: Path, command: str = "log") -> str:
    """The stderr of a command, whose exit code is also checked."""
    runs = [str(run)] * (1 if command == "log" else 2)
    done = CliRunner().invoke(cli, [command, *runs])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    assert done.exit_code == (1 if done.stderr and command == "log" else 0)
    assert done.stdout  # the existing lines are printed anyway
    return done.stderr


def test_a_complete_log_may_be_of_any_lives(run):
    """Steps done again, a life that ends before an earlier one, a late event of an old life, and a
    discarded branch are no errors."""
    assert said(run) == said(run, "fingerprints") == ""
    (run / "log.5.jsonl").write_text(lines(range(26, 29)))
    left = event("checkpoint", 3, 39, THEIRS) + event("checkpoint", 5, 28)
    with (run / "ledger.jsonl").open("a") as ledger:
        ledger.write(event("start", 5, 25) + left + event("checkpoint", 1, 11))
        ledger.write(event("checkpoint", 5, 29, error="full", chain_fp=None))
    assert said(run) == said(run, "fingerprints") == ""


def cut(run: Path, life: int, keep: slice) -> None:
    path = run / f"log.{life}.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[keep]))


FOREIGN = r"step 11 \(generation 2\) does not follow from step 10 \(generation 1\)"
DAMAGE = {
    "lost": (lambda run: (run / "log.2.jsonl").unlink(), "it lacks steps 13 to 20:"),
    "first": (lambda run: (run / "log.1.jsonl").unlink(), "it lacks steps 1 to 10:"),
    "newest": (lambda run: (run / "log.4.jsonl").unlink(), "it lacks steps 31 to 40:"),
    "truncated": (lambda run: cut(run, 3, slice(0, 9)), "it lacks step 30:"),
    "end cut": (lambda run: cut(run, 4, slice(0, 3)), "it lacks steps 34 to 40:"),
    "two": (lambda run: cut(run, 3, slice(1, 9)), "it lacks steps 21, 30:"),
    "foreign": (
        lambda run: (run / "log.2.jsonl").write_text(lines(range(11, 21), THEIRS)),
        FOREIGN + r"; step 20 \(generation 2\) has another chain_fp than ledger.jsonl; step 21",
    ),
    "all foreign": (
        lambda run: [
            (run / f"log.{life}.jsonl").write_text(lines(range(a, a + 10), THEIRS))
            for life, a in ((1, 1), (2, 11), (3, 21), (4, 31))
        ],
        r"step 10 \(generation 1\) has another chain_fp .* and 1 more lines",
    ),
    "a digit": (
        lambda run: (run / "log.3.jsonl").write_text(
            lines(range(21, 31)).replace(OURS[25][0], OURS[24][0])
        ),
        r"step 25 \(generation 3\) does not follow from step 24 \(generation 3\):",
    ),
    "no step": (
        lambda run: (run / "log.3.jsonl").write_text(
            lines(range(21, 31)) + f'{{"step": {10**30}}}\n{{"step": -7}}'
        ),
        "generation 3 has a line of invalid step -7; generation 3 has a line of invalid step 1000",
    ),
    "torn": (
        lambda run: (run / "log.3.jsonl").write_text(lines(range(21, 31)).replace("}", "", 1)),
        "it lacks step 21:",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_missing_and_foreign_lines_are_named(run, damage):
    """The message has the first and the last step; `log` ends with exit code 1, `fingerprints`
    still compares, and the files do not change."""
    do, wanted = DAMAGE[damage]
    do(run)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    assert re.search(wanted, said(run)), said(run)
    assert f"the log of run {run} is incomplete" in said(run)
    if damage != "no step":  # it has no fingerprints to compare
        assert re.search(wanted, said(run, "fingerprints"))
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before


def test_a_state_that_differs_from_the_ledger_is_named(run):
    """A state of the same rows with another learning rate is named, and so is an invalid
    fingerprint. Discarded branches, and events or lines without a fingerprint, do not count."""
    made = [json.loads(line) for line in lines(range(21, 31)).splitlines()]
    made[9]["state_fp"] = f"{7:016x}"
    (run / "log.3.jsonl").write_text("".join(json.dumps(line) + "\n" for line in made))
    ledger = run / "ledger.jsonl"
    before = ledger.read_text()
    left = event("checkpoint", 2, 29, state_fp=f"{9:016x}")  # life 3 began from step 20
    for value in (f"{7:016x}", None):  # the start of life 4 has no state_fp
        ledger.write_text(before + left + event("checkpoint", 3, 30, state_fp=value))
        assert said(run) == said(run, "fingerprints") == ""
    wanted = "step 30 (generation 3) has another state_fp than ledger.jsonl:"
    for value in (f"{9:016x}", 7, "damaged"):
        text = event("checkpoint", 3, 30, state_fp=value) + event("checkpoint", 3, 30)
        ledger.write_text(before + text)
        assert wanted in said(run) and wanted in said(run, "fingerprints")


def test_a_life_that_logs_during_the_read_is_no_gap(run, monkeypatch):
    """After a reader has read its log, a life logs more and ends, and the next one begins."""
    (run / "log.3.jsonl").write_text(lines(range(21, 26)))
    (run / "log.4.jsonl").unlink()
    real = history.lines_of

    def meanwhile(path, *about):
        found = real(path, *about)
        if path.name == "log.3.jsonl":
            (run / "log.3.jsonl").write_text(lines(range(21, 31)))
            (run / "log.4.jsonl").write_text(lines(range(31, 41)))
        return found

    monkeypatch.setattr(history, "lines_of", meanwhile)
    assert [line["step"] for line in history.history(run)] == list(range(1, 26))
