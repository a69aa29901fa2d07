"""A start of a run with two thousand lives reads only the ends of its newest files."""

import json
import random
from pathlib import Path

import pytest

from gptddp.run import history, summary
from gptddp.run.directory import LEDGER, log_path
from gptddp.run.history import Ledger, RunLog
from gptddp.run.summary import HASH, Summary, hash_of


def a_start(life: int, sums: Summary, **fields) -> dict:
    """A start as the recorder writes it, with the sums of all earlier events and of itself."""
    event = {"event": "start", "time": 1e9 + life, "generation": life, **fields}
    sums.add(event)
    event |= {"sums": sums.sums()}
    return event | {HASH: hash_of(json.loads(json.dumps(event)))}


def append(run: Path, *events: dict) -> None:
    with (run / LEDGER).open("a") as ledger:
        ledger.write("".join(json.dumps(event) + "\n" for event in events))


def aged(run: Path, lives: int, seed: int = 1) -> Path:
    """A run whose lives have gone back and forth, and have torn ends."""
    run.mkdir()
    sums, events, step, size = Summary(), [], 0, 0
    choose = random.Random(seed)
    for life in range(1, lives + 1):
        about = {"step": step, "source": f"step-{step:012d}.{life}", "config": {"keep": life}}
        phases = {"step": [1.0, 2.0]}
        saved = {"event": "checkpoint", "name": f"step-{step:012d}.{life}", "step": step}
        saved |= {"time": 1e9 + life + 0.5, "generation": life, "phases": phases}
        sums.bytes = size
        new = [a_start(life, sums, world_size=2, seconds=0.1, redo=2, **about), saved]
        size += sum(len(json.dumps(event)) + 1 for event in new)
        sums.add(saved)
        events += new
        more = choose.randint(0, 9)
        lines = [json.dumps({"step": step + i, "time": 1.0}) for i in range(1, more + 1)]
        tail = choose.choice(["", '{"step": 7'])
        log_path(run, life).write_text("".join(f"{line}\n" for line in lines) + tail)
        step = max(0, step + choose.randint(-3, more))
    append(run, *events)
    return run


def bytes_read() -> int:
    """Bytes that this process has read so far, from disk or cache."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def start_reads(run: Path, lives: int) -> int:
    """The bytes that a start reads of log and ledger."""
    step, before = history.last_step(run), bytes_read()
    ledger = summary.read(run)
    assert history.highest_generation(run, ledger) == lives == ledger.life
    assert [line["step"] for line in history.history(run, step, step)] == [step]
    log, book = RunLog(run, lives + 1), Ledger(run)
    history.complete(run, log, [{"step": step + 1}, {"step": step + 2}], step)
    event = {"event": "end", "time": 1.0, "generation": lives}
    assert history.recover(run, book, [event]) == [event]
    log.close()
    book.close()
    return bytes_read() - before


def test_a_start_reads_no_more_of_an_old_run(tmp_path):
    """After two thousand lives a start reads as little as after a hundred."""
    few = start_reads(aged(tmp_path / "few", 100), 100)
    many = start_reads(aged(tmp_path / "many", 2000), 2000)
    assert many < 1.5 * few < 200_000, (few, many)


def without_sums(run: Path) -> Summary:
    """The state from all events of the ledger, one after the other."""
    found = Summary()
    for event in history.read_ledger(run):
        found.add(event)
    found.bytes = (run / LEDGER).stat().st_size
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_sums_of_the_newest_start_equal_those_of_all_events(tmp_path, seed):
    """Runs, commits, decisions and rank-seconds are equal, with the events after that start."""
    run = aged(tmp_path / "run", 40, seed)
    assert summary.read(run) == without_sums(run)
    of = {"time": 2e9, "generation": 40}
    append(
        run,
        of | {"event": "quarantine", "step": 5, "row_groups": [1, 2], "names": []},
        of | {"event": "diverged", "step": 9, "names": ["rank 1"]},
        of | {"event": "checkpoint", "step": 9, "error": "full"},
        of | {"event": "stop", "step": 9, "cause": "steps", "tokens": 7, "train_s": 2.5},
    )
    found = summary.read(run)
    assert found == without_sums(run) and found.ended and found.void == 40
    assert (found.differed, found.saved_time, found.life) == ("rank 1", 1e9 + 40.5, 40)
    wanted = {"generation": 40, "step": 9, "tokens": 7, "train_s": 2.5, "cause": "steps"}
    wanted["results"] = None
    assert found.finished == wanted and found.is_finished and found.config == {"keep": 40}
    for again in (41, 42):
        found.add({"event": "start", "time": 3e9, "generation": again, "source": "memory"})
        assert not found.is_finished and found.finished == wanted
    found.add({"event": "start", "time": 3e9, "generation": 43, "source": "scratch"})
    assert found.finished is None and found.commits == []


def test_an_event_during_the_start_of_a_life_is_not_lost(tmp_path):
    """A save counts that comes after this life has read the ledger, and before its start event."""
    run = aged(tmp_path / "run", 3)
    sums = summary.read(run)
    late = {"event": "checkpoint", "name": "step-000000000099.3", "time": 1.5, "generation": 3}
    append(run, late, a_start(4, sums))
    assert summary.read(run).commits[-1] == late["name"]


def test_a_line_that_is_being_written_counts_once_it_is_complete(tmp_path):
    """An incomplete line is no damage, and no start has its bytes in its sums."""
    run = aged(tmp_path / "run", 3)
    whole, text = summary.read(run), json.dumps({"event": "stop", "time": 2.0, "generation": 3})
    with (run / LEDGER).open("a") as ledger:
        ledger.write(text[:-9])
        ledger.flush()
        assert summary.read(run) == whole
        ledger.write(text[-9:] + "\n")
    assert summary.read(run).ended and not summary.read(run).left_out


@pytest.mark.parametrize("order", [[2], [2, 1], [1, 2, 1], [2, 2]])
def test_a_late_start_is_not_the_newest(tmp_path, order):
    """A late start was in memory during an outage, or is of a superseded life that still runs."""
    run = aged(tmp_path / "run", 1)
    starts = {life: a_start(life, summary.read(run), config={"keep": life}) for life in (1, 2)}
    append(run, *(starts[life] for life in order))
    log_path(run, 2).write_text('{"step": 9, "time": 1.0}\n')
    found = summary.read(run)
    assert (found.life, found.config, found.left_out) == (2, {"keep": 2}, [])


def test_a_damaged_start_does_not_count(tmp_path):
    """The start before it counts, with all events since; the damaged line is named."""
    run = aged(tmp_path / "run", 4)
    lines = (run / LEDGER).read_text().splitlines(keepends=True)
    wanted = summary.read(run)
    lines[-2] = lines[-2].replace('"keep": 4', '"keep": 5')
    (run / LEDGER).write_text("".join(lines))
    found = summary.read(run)
    assert (found.life, found.config) == (3, {"keep": 3}) and found.commits == wanted.commits
    assert "a 'start' of generation 4 at byte" in found.left_out[0]
