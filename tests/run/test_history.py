"""The log and the ledger of a run survive kills, many generations and full disks."""

import errno
import json
import os
import subprocess
import sys
import threading

import pytest

from gptddp.files import lock
from gptddp.run import lines, summary
from gptddp.run.history import (
    Ledger,
    RunLog,
    complete,
    highest_generation,
    history,
    last_step,
    read_ledger,
    recover,
)


def write(run_dir, generation, steps, **fields):
    log = RunLog(run_dir, generation)
    for step in steps:
        log.append({"step": step, "time": 1.0, "generation": generation, **fields})
    log.close()


def event(run_dir, *args, **fields):
    ledger = Ledger(run_dir)
    ledger.event(*args, **fields)
    ledger.close()


def generations(run_dir):
    return [(line["step"], line["generation"]) for line in history(run_dir)]


def test_round_trip(tmp_path):
    """Each line is read as it was written, with null for a non-finite number."""
    log = RunLog(tmp_path, 1)
    line = {"step": 1, "loss": 0.1 + 0.2, "batch_fp": "00ff00ff00ff00ff", "time": 1.79e9}
    log.append(line)
    log.append({"step": 2, "loss": float("nan"), "grad_norm": float("inf")})
    log.sync()
    assert list(history(tmp_path)) == [line, {"step": 2, "loss": None, "grad_norm": None}]
    assert (tmp_path / "log.1.jsonl").read_bytes().count(b"\n") == 2


def test_history_takes_the_highest_generation_of_each_step(tmp_path):
    """A repeated step has the newer generation's line, other steps the older's, all in order."""
    write(tmp_path, 1, range(6))
    write(tmp_path, 2, range(2, 5))
    write(tmp_path, 10, range(2, 4))
    assert generations(tmp_path) == [(0, 1), (1, 1), (2, 10), (3, 10), (4, 2), (5, 1)]
    assert list(history(tmp_path / "absent")) == []


def test_no_log_is_read_for_steps_before_the_first(tmp_path):
    """A short run with many lives is not read in full, and an invalid line replaces no step."""
    for life, steps in ((1, [1, 2, 3]), (2, [1, 2, 3]), (3, [0, 2, 3])):
        write(tmp_path, life, steps)
    read: list[str] = []
    found = list(history(tmp_path, -61, 3, lambda text: read.append(text[-1])))
    assert [(it["step"], it["generation"]) for it in found][-3:] == [(1, 2), (2, 3), (3, 3)]
    assert read == ["3", "2"]


def test_history_can_begin_at_any_step(tmp_path):
    """History can begin at any step, even with lines that were written again after a failed fsync,
    or by the next life; and the last step of all is known."""
    write(tmp_path, 1, [1, 2, 3, 4, 2, 3, 4, 5, 5, 6])
    write(tmp_path, 2, [3, 4])
    with open(tmp_path / "log.2.jsonl", "ab") as file:
        file.write(b'{"step": 9, "lo\n' + b"\0" * 20_000 + b"\n")
    write(tmp_path, 2, [7, 8])
    log = RunLog(tmp_path, 3)
    complete(
        tmp_path, log, [{"step": step, "time": 1.0, "generation": 3} for step in range(4, 8)], 7
    )
    complete(
        tmp_path, log, [{"step": 8, "time": 1.0, "new": 1}, {"step": 9}], 8
    )  # step 9 is not done
    log.close()
    whole = list(history(tmp_path))
    assert [(line["step"], line.get("generation")) for line in whole] == [
        *((1, 1), (2, 1), (3, 2), (4, 2), (5, 1), (6, 1), (7, 2), (8, None))
    ]
    for first in range(11):
        assert list(history(tmp_path, first)) == [x for x in whole if x["step"] >= first]
    assert last_step(tmp_path) == 8 and last_step(tmp_path / "absent") == 0


def test_lines_kept_in_memory_replace_those_of_another_run(tmp_path):
    """If another run's log has the same steps, the steps that were done are still logged."""
    write(tmp_path, 1, [1, 2], chain_fp="a")
    write(tmp_path, 2, [3, 4], chain_fp="foreign")
    kept = [{"step": step, "loss": 0.0, "generation": 2, "chain_fp": "a"} for step in (3, 4)]
    log = RunLog(tmp_path, 3)
    complete(tmp_path, log, kept, 4)
    log.close()
    assert [line["chain_fp"] for line in history(tmp_path)] == ["a"] * 4


def test_events_kept_in_memory_are_added_once(tmp_path):
    """Only missing events are added, even those of earlier lives, and none of them twice."""
    ledger = Ledger(tmp_path)
    for life in (1, 2, 3):
        ledger.event("start", life)
    ledger.sync()
    kept = [{"event": "end", "generation": 1, "time": 1.0}, read_ledger(tmp_path)[1]]
    assert recover(tmp_path, ledger, kept) == kept[:1]
    ledger.sync()
    assert recover(tmp_path, ledger, kept) == []
    ledger.close()


@pytest.mark.parametrize("tail", [b'{"step": 3, "lo', b'{"step": 3', b"\0\0\0", b"7\n", b"\xff\n"])
def test_torn_lines_are_skipped(tmp_path, tail):
    """The torn end of a file, from a killed writer or a crashed disk, is not a line."""
    write(tmp_path, 1, range(3))
    with open(tmp_path / "log.1.jsonl", "ab") as file:
        file.write(tail)
    assert [step for step, _ in generations(tmp_path)] == [0, 1, 2]
    write(tmp_path, 1, [8])  # a line after the torn one is whole
    assert [step for step, _ in generations(tmp_path)] == [0, 1, 2, 8]


def test_a_line_is_handed_to_the_system_at_once(tmp_path):
    """SIGKILL right after `append` loses no line, even without `sync`."""
    code = (
        "import os, sys, time; from gptddp.run.history import RunLog\n"
        "log = RunLog(sys.argv[1], 1)\n"
        "for step in range(100): log.append({'step': step})\n"
        "assert log.settle(30); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert done.returncode == -9
    assert [line["step"] for line in history(tmp_path)] == list(range(100))


def test_a_full_disk_delays_lines_and_raises_only_from_sync(tmp_path, monkeypatch):
    """Lines wait in memory through an outage, which `trouble` reports, and follow in order."""
    log = RunLog(tmp_path, 1)
    log.append({"step": 0})
    assert log.settle(30)
    write_some = os.write
    room = 17  # free bytes: one line and a part of the next

    def nearly_full(fd, data):
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write_some(fd, data[:room])
        room -= count
        return count

    monkeypatch.setattr(os, "write", nearly_full)
    for step in range(1, 5):
        log.append({"step": step})
    with pytest.raises(OSError, match="No space left"):
        log.sync()
    assert [line["step"] for line in history(tmp_path)] == [0, 1]
    assert "No space left" in log.trouble(60)
    monkeypatch.undo()
    log.append({"step": 5})
    log.sync()
    assert [line["step"] for line in history(tmp_path)] == list(range(6))
    assert log.trouble(60) is None


def test_lines_that_an_fsync_has_lost_are_written_again(tmp_path, monkeypatch):
    """A network file system accepts lines, fails their fsync and drops them."""
    log = RunLog(tmp_path, 1)
    log.append({"step": 1})
    log.sync()
    real = os.fsync

    def drop(fd):
        monkeypatch.setattr(os, "fsync", real)
        os.ftruncate(fd, 12)
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "fsync", drop)
    log.append({"step": 2})
    with pytest.raises(OSError, match="quota"):
        log.sync()
    log.sync()
    assert [line["step"] for line in history(tmp_path)] == [1, 2]


def test_a_hanging_disk_blocks_no_caller(tmp_path, monkeypatch):
    """`append` and `close` return while a write hangs; a step waits for earlier events."""
    monkeypatch.setattr(lines, "RETRY_S", 0.01)
    opened, real = threading.Event(), os.fsync

    def hang(fd):
        assert opened.wait(60)
        real(fd)

    monkeypatch.setattr(os, "fsync", hang)
    ledger = Ledger(tmp_path)
    log = RunLog(tmp_path, 1, ledger)
    ledger.event("quarantine", 1)
    for step in range(100):
        log.append({"step": step})
    log.close(0.1)
    assert not ledger.settle(0.1) and list(history(tmp_path)) == []
    assert "the disk has hung" in log.trouble(0.05) and log.trouble(60) is None
    opened.set()
    log.sync()
    assert len(list(history(tmp_path))) == 100 and len(read_ledger(tmp_path)) == 1
    ledger.close()


WITHOUT_APPEND = """
import os, sys, time
from gptddp.run.history import Ledger
opened = os.open
def write(fd, data):
    end = os.fstat(fd).st_size
    time.sleep(0.002)
    return os.pwrite(fd, data, end)
os.open = lambda path, flags, *rest, **more: opened(path, flags & ~os.O_APPEND, *rest, **more)
os.write = write
ledger = Ledger(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
for i in range(60):
    ledger.event("checkpoint", int(sys.argv[2]), step=i, name="x" * (i % 7))
ledger.sync()
"""


def test_two_machines_write_one_ledger(tmp_path, spawn):
    """Each machine writes at its own idea of the end, as on NFS, which has no atomic append: all
    events of both exist, and every line is whole."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    command = [sys.executable, "-c", WITHOUT_APPEND, str(tmp_path)]
    both = [spawn([*command, str(life)], **pipes) for life in (1, 2)]
    for process in both:
        assert process.stdout.readline() == "ready\n"
    for process in both:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.wait(60) for process in both] == [0, 0]
    found = sorted((it["generation"], it["step"]) for it in read_ledger(tmp_path))
    assert found == [(life, step) for life in (1, 2) for step in range(60)]
    assert not summary.read(tmp_path).left_out


def test_a_ledger_does_not_wait_for_a_stopped_process(tmp_path, monkeypatch):
    """If a process of an old life was stopped during an append, new events follow its line."""
    monkeypatch.setattr(lines, "LOCK_S", 0.05)
    event(tmp_path, "start", 1)
    holder = lock(tmp_path / "ledger.jsonl")
    event(tmp_path, "start", 2)
    os.close(holder)
    assert [it["generation"] for it in read_ledger(tmp_path)] == [1, 2]


def test_the_ledger_gives_its_events_in_order(tmp_path):
    """Events are read in order, with time and fields, over several lives, and no other lines."""
    event(tmp_path, "start", 1, world_size=4)
    with open(tmp_path / "ledger.jsonl", "ab") as file:
        file.write(b'{"event": "start"}\n7\n{"event": "diverged", "generation": "9"}\n')
        file.write(b'{"event": "torn')
    event(tmp_path, "fault", 2, cause="rank 3: killed", seconds=1.5)
    first, second = read_ledger(tmp_path)
    assert first["event"] == "start" and first["world_size"] == 4 and first["time"] > 1.7e9
    assert (second["event"], second["generation"], second["seconds"]) == ("fault", 2, 1.5)
    assert read_ledger(tmp_path / "absent") == []


def test_the_highest_generation_counts_every_record(tmp_path):
    """Every record that a life may have written counts; the number is 0 for a new run."""
    assert highest_generation(tmp_path / "absent") == highest_generation(tmp_path) == 0
    traces = [
        "log.2.jsonl",
        "checkpoints/step-000000000007.3",
        "checkpoints/step-000000000007.4.bad.12",
        "checkpoints/.tmp/step-000000000007.5.0123456789abcdef",
        "checkpoints/.trash/step-000000000007.6.99",
    ]
    for number, trace in enumerate(traces):
        (tmp_path / trace).mkdir(parents=True)
        assert highest_generation(tmp_path) == number + 2
    event(tmp_path, "start", 9)
    for foreign in ("log.77", "log.x.jsonl", "checkpoints/step-7.88x"):
        (tmp_path / foreign).mkdir()
    assert highest_generation(tmp_path) == 9
    assert json.loads((tmp_path / "ledger.jsonl").read_text())["generation"] == 9
