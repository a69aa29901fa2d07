"""A run of ten thousand lives: few files, no line lost, and a start that reads little of it."""

import json
import random
import shutil
import sys
import threading
import time
from pathlib import Path

import pytest
from support.crashing import killed

from gptddp.run import crash_loop, fold, history, log_check, summary, tidy
from gptddp.run.history import Ledger, RunLog
from gptddp.run.lease import Claim


def write_log(run: Path, generation: int, steps, tail: str = "") -> None:
    lines = [json.dumps({"step": step, "loss": generation + step / 7}) for step in steps]
    history.log_path(run, generation).write_text("\n".join(lines) + "\n" + tail)


def aged(run: Path, lives: int, seed: int = 1) -> Path:
    """A run whose lives have gone back and forth, with torn ends, as version 0.1.0 leaves it."""
    run.mkdir()
    events, step = [], 0
    choose = random.Random(seed)
    for life in range(1, lives + 1):
        start = {"event": "start", "step": step, "source": f"step-{step:012d}.{life}"}
        events.append(start | {"time": 1e9 + life, "generation": life})
        more = choose.randint(0, 9)
        write_log(run, life, range(step + 1, step + more + 1), choose.choice(["", '{"step": 7']))
        step = max(0, step + choose.randint(-3, more))
        saved = {"event": "checkpoint", "name": "c", "step": step}
        events.append(saved | {"time": 1e9 + life + 0.5, "generation": life})
    (run / "ledger.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def inodes(run: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in run.glob("log.*")}


@pytest.fixture
def few(monkeypatch):
    """Small limits, so that few logs are many."""
    monkeypatch.setattr(fold, "NEWEST", 2)
    monkeypatch.setattr(fold, "MANY", 3)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("most_bytes", [300, 1000, 1 << 20])
def test_folded_logs_have_the_same_lines(tmp_path, monkeypatch, most_bytes):
    """Each with its generation, however often they are folded; the newest logs stay as they are."""
    monkeypatch.setattr(fold, "MOST_BYTES", most_bytes)
    for seed in range(4):
        monkeypatch.setattr(fold, "MANY", 3)
        run = aged(tmp_path / str(seed), 30, seed)
        before = list(history.logged(run))
        newest = [history.log_path(run, life).read_bytes() for life in (29, 30)]
        for _ in range(3):
            fold.fold(run)
            assert list(history.logged(run)) == before
        assert newest == [history.log_path(run, life).read_bytes() for life in (29, 30)]
        monkeypatch.setattr(fold, "MANY", 6)
        write_log(run, 31, [5, 6, 7])
        write_log(run, 32, [7])
        wanted, files = list(history.logged(run)), inodes(run)
        fold.fold(run)
        assert list(history.logged(run)) == wanted and inodes(run) == files  # two are not many
        total = sum(path.stat().st_size for path in run.glob("log.*"))
        assert len(list(run.glob("log.*"))) <= 6 + 2 + 2 * total / most_bytes + 1
        assert not list(run.glob(".log*"))


def test_a_kill_at_any_point_loses_no_line(tmp_path):
    """SIGKILL at each system call of a fold: the same lines then, and after the next fold."""
    run = aged(tmp_path / "run", 12)
    before = list(history.logged(run))
    for number in range(1, 100):
        copy = tmp_path / str(number)
        shutil.copytree(run, copy)
        code = f"NEWEST, MANY = 2, 3\nfold({str(copy)!r})"
        was_killed = killed(number, "gptddp.run.fold", code)
        assert list(history.logged(copy)) == before, number
        tidy.tidy(copy)
        assert list(history.logged(copy)) == before and not list(copy.glob(".*")), number
        if not was_killed:
            break
    assert number > 10 and len(list(copy.glob("log.*"))) == 3


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("more", [0, 6])
def test_a_reader_beside_finds_every_line(tmp_path, monkeypatch, more):
    """A fold after each log that a reader has read: what vanishes is found in a higher one, maybe
    in one of a life that has begun since."""
    run = aged(tmp_path / "run", 20)
    wanted, real = list(history.logged(run)), history.lines_of
    for turn in range(20):
        copy = tmp_path / str(turn)
        shutil.copytree(run, copy)
        calls = iter(range(100))

        def then_fold(path, first=None, turn=turn, copy=copy, calls=calls):
            if next(calls) == turn:
                for life in range(21, 21 + more):
                    write_log(copy, life, [1000 + life])
                fold.fold(copy)
            return real(path, first)

        monkeypatch.setattr(history, "lines_of", then_fold)
        found = list(history.logged(copy))
        assert [it for it in found if it[1]["step"] < 1000] == wanted
        assert len(list(copy.glob("log.*"))) == 3


@pytest.mark.usefixtures("few")
def test_a_log_that_still_grows_is_not_folded(tmp_path, monkeypatch):
    """A late writer adds a line meanwhile: all stays as it is. So it does for another's run."""
    run = aged(tmp_path / "run", 12)

    def late():
        write_log(run, 3, [99])
        return ""

    fold.fold(run, late)
    assert (99, 3) in [(line["step"], life) for life, line in history.logged(run)]
    assert len(list(run.glob("log.*"))) == 12 and not list(run.glob(".log*"))
    fold.fold(run, lambda: "another job has taken over the run")
    assert len(list(run.glob("log.*"))) == 12 and not list(run.glob(".log*"))


@pytest.mark.usefixtures("few")
def test_a_log_that_is_written_before_it_is_removed_stays(tmp_path, monkeypatch):
    """By a late writer, or by the fold of a life that is over and does not know it yet."""
    run = aged(tmp_path / "run", 12)
    wanted = list(history.logged(run))

    def late(path):
        write_log(run, 3, [99])

    monkeypatch.setattr(fold, "fsync", late)
    fold.fold(run)
    assert [it for it in history.logged(run) if it[1]["step"] != 99] == wanted
    assert (99, 3) in [(line["step"], life) for life, line in history.logged(run)]
    assert len(list(run.glob("log.*"))) == 4


PAUSED = """
import os, sys, time
from gptddp.run import fold
fold.NEWEST, fold.MANY = 2, 3
run, here, real = sys.argv[1], sys.argv[1] + ".here", os.replace
def pause(*paths):
    open(here, "w").close()
    while os.path.exists(here):
        time.sleep(0.01)
    real(*paths)
os.replace = pause
fold.fold(run)
"""


@pytest.mark.usefixtures("few")
def test_two_folds_at_once_lose_no_line(tmp_path, spawn):
    """That of a life which is over, stopped a moment before its rename, and that of the next life,
    with a line that a late writer has added between: a reader finds it at any moment."""
    run = aged(tmp_path / "run", 12)
    old = spawn([sys.executable, "-c", PAUSED, str(run)])
    here = Path(f"{run}.here")
    while not here.exists():
        assert old.poll() is None
        time.sleep(0.01)
    with history.log_path(run, 3).open("a") as file:
        file.write('\n{"step": 99}\n')
    wanted = list(history.logged(run))
    fold.fold(run)
    assert list(history.logged(run)) == wanted
    here.unlink()
    while old.poll() is None:
        assert list(history.logged(run)) == wanted
    assert old.returncode == 0 and list(history.logged(run)) == wanted
    fold.fold(run)
    assert list(history.logged(run)) == wanted and not list(run.glob(".*"))
    assert 3 in [life for life, line in wanted if line["step"] == 99]


def test_a_life_folds_only_while_its_lease_is_on_the_disk(tmp_path):
    """What the file says counts, not what the life has last seen; and asking makes no lease."""
    (lease := Claim(tmp_path, "a").poll(1)).close()
    assert lease.elsewhere() == ""
    mine = lease.path.read_text()
    lease.path.write_text(mine.replace(lease.me["holder"], "another"))
    assert "is not of this life" in lease.elsewhere()
    lease.path.unlink()
    assert lease.elsewhere() and not lease.path.exists()


def bytes_read() -> int:
    """By this process so far, from wherever the system had them."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def start_reads(run: Path, lives: int) -> int:
    """The bytes that a start reads of log and ledger, after the run was tidied up once."""
    tidy.tidy(run)
    step = history.last_step(run)
    before = bytes_read()
    ledger = summary.read(run)
    assert history.highest_generation(run, ledger) == lives == ledger.life
    assert list(history.history(run, step))[-1]["step"] >= step
    log, book = RunLog(run, lives + 1), Ledger(run)
    history.complete(run, log, [{"step": step + 1}, {"step": step + 2}], step + 2)
    event = {"event": "end", "time": 1.0, "generation": lives}
    assert history.recover(run, book, [event]) == [event]
    assert log_check.at_start(run, step + 1, "", None, []) and not log_check.holes(run)
    log.close()
    book.close()
    return bytes_read() - before


def test_a_start_reads_no_more_of_an_old_run(tmp_path):
    """After ten thousand lives as little as after a hundred, of as few files."""
    few = start_reads(aged(tmp_path / "few", 100), 100)
    many = start_reads(aged(tmp_path / "many", 10_000), 10_000)
    assert many < 2 * few + 2 * summary.STALE_BYTES, (few, many)
    assert many < 2 * fold.MANY * 8192 + 2 * summary.STALE_BYTES
    assert len(list((tmp_path / "many").iterdir())) <= fold.MANY + fold.NEWEST + 5


def test_a_life_after_another_leaves_few_files(tmp_path, monkeypatch):
    """Lives that each fail at a step of their own, and are killed within a write: what they leave
    is bounded, and all of the log is there."""
    monkeypatch.setattr(crash_loop, "KEPT_LIVES", 20)
    run, lives = tmp_path, 70
    for life in range(1, lives + 1):
        write_log(run, life, [life])
        for rank in range(2):
            error = {"step": 10 * life, "generation": life, "rank": rank, "pod": ""}
            assert crash_loop.final(ValueError("broken"), run, **error) is None
        (run / f".config.json.{life}.tmp").touch()
        tidy.tidy(run)
    assert [life for life, _ in history.logged(run)] == list(range(1, lives + 1))
    assert len(list(run.iterdir())) <= fold.MANY + fold.NEWEST + 2
    assert len(list((run / "faults").iterdir())) == 2 * 20
    assert crash_loop.first(run, lives) and not crash_loop.first(run, 1)


def test_a_life_tidies_up_after_those_before_it(run, tmp_path):
    """While it trains: few logs, a sum of the ledger, and every step is there once."""
    assert run("--steps", "2") == 0
    it = tmp_path / "run"
    for life in range(2, 70):
        shutil.copy(it / "log.1.jsonl", history.log_path(it, life))
    start = {"event": "start", "step": 0, "source": "scratch", "time": 1e9, "generation": 69}
    with open(it / "ledger.jsonl", "a") as ledger:
        ledger.write((json.dumps(start) + "\n") * 1000)
    assert run("--steps", "4") == 0
    for thread in threading.enumerate():
        if thread.name == "tidy":
            thread.join(60)
    assert [line["step"] for line in history.history(it)] == [1, 2, 3, 4]
    assert len(list(it.glob("log.*"))) <= fold.MANY + fold.NEWEST + 1
    assert not (it / "lease.json").exists()
    assert json.loads((it / "ledger.summary.json").read_text())["summary"]["life"] == 70


def test_the_fingerprints_of_each_line_are_found_as_a_trainer_writes_it(run, tmp_path):
    """Also of a step that was evaluated, and of the last: else no foreign log would be seen."""
    assert run("--steps", "3", "--eval-every", "2") == 0
    texts = history.log_path(tmp_path / "run", 1).read_bytes().splitlines()
    for text, line in zip(texts, map(json.loads, texts), strict=True):
        prints = tuple(int(line[name], 16) for name in ("batch_fp", "chain_fp"))
        assert fold._prints(text) == prints
    assert len(texts) == 3


def test_the_sum_of_the_ledger_is_that_of_all_its_events(tmp_path, monkeypatch):
    """From the file and what came after it; and from the whole, where the file is missing, torn,
    changed, or of another ledger. A line that is being written is counted when it is whole."""
    monkeypatch.setattr(summary, "STALE_BYTES", 1)
    run = aged(tmp_path / "run", 40)
    more = [
        {"event": "quarantine", "step": 5, "row_groups": [1, 2], "names": []},
        {"event": "diverged", "step": 9, "names": ["rank 1"]},
        {"event": "checkpoint", "step": 9, "error": "full"},
        {"event": "stop", "step": 9, "cause": "steps"},
    ]
    events = history.read_ledger(run) + [it | {"time": 2e9, "generation": 40} for it in more]

    def summed(these):
        found = summary.Summary()
        for event in these:
            found.add(event)
        return found

    whole = summed(events)
    assert whole == summed([*events, *events]) and whole.ended and whole.void == 40
    assert (whole.differed, whole.saved_time, whole.life) == ("rank 1", 1e9 + 40.5, 40)
    summary.refresh(run)
    file, ledger = run / "ledger.summary.json", run / "ledger.jsonl"
    old, rest = file.read_text(), "".join(json.dumps(event) + "\n" for event in events[-4:])
    ledger.write_text(ledger.read_text() + rest[:-9])
    assert not summary.read(run).ended
    summary.refresh(run)
    ledger.write_text(ledger.read_text() + rest[-9:])
    assert summary.read(run) == whole
    summary.refresh(run)
    new = file.read_text()
    assert new != old
    damaged = [new[:-30], "", "7", "[" * 10**6, new.replace('"void": 40', '"void": 41')]
    for text in (new, old, *damaged):
        file.write_text(text)
        assert summary.read(run) == whole
    file.write_text(new)
    ledger.write_text(ledger.read_text().replace("rank 1", "rank 2"))
    assert summary.read(run).differed == "rank 2"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:7]))
    assert summary.read(run) == summed(history.read_ledger(run))
    ledger.unlink()
    assert summary.read(run) == summary.Summary()


def test_a_start_that_memory_has_kept_is_no_newer_for_being_written_late():
    """A launcher's late save may write it again behind the start of the next life: what that one
    runs with counts."""
    starts = [
        {"event": "start", "time": 1e9, "generation": life, "config": {"keep": life}}
        for life in (2, 3)
    ]
    for order in ([0, 1], [0, 1, 0], [1, 0]):
        found = summary.Summary()
        for i in order:
            found.add(starts[i])
        assert (found.life, found.config) == (3, {"keep": 3})
