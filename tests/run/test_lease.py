"""One job at a time holds a run directory: real processes hold it, die, stop, and come late.

Fault 28 of the fault table; tests/training/test_fence.py has the late writer.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest
from support.crashing import killed
from support.waiting import until

from gptddp.errors import ConfigError, Superseded
from gptddp.run import lease, lease_file
from gptddp.run.directory import LEASE

PERIOD_S, EXPIRY_S = 0.1, 1.0
HOLD = f"""
import logging, sys
from pathlib import Path
from gptddp import errors
from gptddp.run import lease, lease_file
logging.basicConfig(format="%(message)s")
lease.PERIOD_S, lease.EXPIRY_S, lease._POLL_S = {PERIOD_S}, {EXPIRY_S}, 0.05
job, life, *follows = sys.argv[2:]
claim, mine = lease.Claim(Path(sys.argv[1]), job or None, life, follows), None
try:
    while mine is None:
        mine = claim.poll(1.0)
except errors.ConfigError as error:
    print(f"refused: {{error}}", flush=True)
    sys.exit(2)
print("held", flush=True)
for line in sys.stdin:
    try:
        mine.check()
        print("mine", flush=True)
    except errors.Superseded as error:
        print(error, flush=True)
mine.release()
"""


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Waits within the test process take a second, not twelve."""
    monkeypatch.setattr(lease, "PERIOD_S", PERIOD_S)
    monkeypatch.setattr(lease, "EXPIRY_S", EXPIRY_S)


@pytest.fixture
def holder(tmp_path, spawn):
    """holder(job, life, *lives that it follows) -> a process that asks for the run."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    return lambda job="", *lives: spawn([*command, job, *(lives or [""])], text=True, **pipes)


@pytest.fixture
def acquire(tmp_path):
    """acquire(job, life, *lives that it follows) -> this process's lease, until the test ends."""
    held = []

    def take(job=None, life="", *follows):
        claim = lease.Claim(tmp_path, job, life, follows)
        held.append(until(lambda: claim.poll(0.1)))
        return held[-1]

    yield take
    for it in held:
        it.close()


def word(process):
    return process.stdout.readline().strip()


def ask(process):
    """The result when a holder checks its lease."""
    process.stdin.write("\n")
    process.stdin.flush()
    return word(process)


def edit(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_one_of_several_waiting_processes_takes_over(tmp_path, holder):
    """The lease of a dead machine expires for four at once: one takes over, three are refused with
    the holder and the fix; a clean end leaves no file."""
    first = holder()
    assert word(first) == "held"
    first.kill()
    first.wait()
    edit(tmp_path / LEASE, space="another machine", job="old at host:1")
    processes = [holder() for _ in range(4)]
    words = [word(process) for process in processes]
    assert sorted(text[:7] for text in words) == ["held", *["refused"] * 3]
    process = processes[words.index("held")]
    for text in words:
        if text != "held":
            assert f"run {tmp_path} is in use by a job without a name on host" in text
            assert f"(process {process.pid})" in text and "--run-dir" in text
    err = process.communicate("")[1]
    waits = f"waiting {EXPIRY_S:.0f} s to see whether job old at host:1 on host"
    assert err.count(waits) == 1 and process.returncode == 0 and os.listdir(tmp_path) == []


def test_a_killed_holder_is_followed_at_once(holder, acquire, caplog):
    """On one machine nobody waits for a dead process, zombie or reaped, even if its pid is
    reused."""
    first = holder("job at a:1")
    assert word(first) == "held"
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: lease_file.start_ticks(first.pid) is None)  # not reaped yet: a zombie
    mine = acquire("other at b:1")
    edit(mine.path, owner="third", holder="x", started=1)  # its pid is another process's now
    acquire()
    assert caplog.text == ""


def test_the_same_job_takes_over_at_once(holder, acquire, caplog):
    """A later life of a job gets the run at once; the earlier one notices it, and ends."""
    first = holder("job at a:1", "life 1")
    assert word(first) == "held" and ask(first) == "mine"
    mine = acquire("job at a:1", "life 3", "life 1", "life 2")
    assert f"(process {os.getpid()}) has taken over the run" in ask(first)
    first.communicate()  # its release does not remove the successor's lease
    mine.check()
    assert caplog.text == ""


def waits(process):
    """The log line that a process waits, and for which holder."""
    return next(line for line in process.stderr if "waiting as long as" in line)


def test_two_halves_of_a_job_do_not_take_the_run_from_each_other(holder, acquire, tmp_path):
    """Both halves follow the life before the cut: one gets the run at once, the other names it and
    waits for its end. A member that changes sides takes the run with it, once."""
    before = holder("job", "life 1")
    assert word(before) == "held"
    one = holder("job", "life 2", "life 1")
    assert word(one) == "held" and "taken over" in ask(before)
    other = holder("job", "life 3", "life 1")
    assert f"(process {one.pid}) renews" in waits(other)
    joined = holder("job", "life 4", "life 1", "life 2")  # with a member of `one`
    assert word(joined) == "held" and "taken over" in ask(one)
    rest = holder("job", "life 5", "life 1", "life 2")  # the other members of `one`
    assert f"(process {joined.pid}) renews" in waits(rest)
    time.sleep(1.5 * EXPIRY_S)
    assert ask(joined) == "mine" and other.poll() is None
    joined.kill()
    until(lambda: json.loads((tmp_path / LEASE).read_text())["pid"] in (other.pid, rest.pid))


def test_two_jobs_of_one_name_do_not_take_the_run_from_each_other(holder):
    """With one manifest in two clusters, the second job has no life in common with the first: it
    waits, names the holder and the fix, and gets the run when the first has ended."""
    first = holder("job at a:1", "life 1")
    assert word(first) == "held"
    second = holder("job at a:1", "life 2")
    line = waits(second)
    assert f"job job at a:1 on host {os.uname().nodename} (process {first.pid})" in line
    assert "to end the wait, delete this one" in line
    assert ask(first) == "mine"
    first.communicate("")
    assert word(second) == "held"


def test_a_lease_that_is_just_being_written_refuses_nobody(tmp_path, acquire):
    """If the holder's job begins another life, its new lease is empty for a moment."""
    first = acquire("job", "life 1")
    edit(tmp_path / LEASE, space="another machine")
    claim = lease.Claim(tmp_path, "job", "life 2")
    assert claim.poll(5 * PERIOD_S) is None
    first.close()
    whole = (tmp_path / LEASE).read_bytes()
    for text in (b"", whole[:9], whole):
        (tmp_path / LEASE).write_bytes(text)
        assert claim.poll(0) is None


def test_a_lease_that_is_just_being_replaced_is_not_free(tmp_path, acquire):
    """The holder's next life removes the old lease before it writes its own."""
    first = acquire("job", "life 1")
    edit(tmp_path / LEASE, space="another machine")
    claim = lease.Claim(tmp_path, "job", "life 2")
    assert claim.poll(0) is None
    first.close()
    os.unlink(tmp_path / LEASE)
    assert claim.poll(0) is None
    following = acquire("job", "life 3", "life 1")
    edit(tmp_path / LEASE, space="another machine")
    assert claim.poll(0) is None
    following.release()
    until(lambda: claim.poll(0.1)).close()


def test_an_unusable_directory_restarts_the_wait(tmp_path, holder, monkeypatch, caplog):
    """The error is reported, and the wait begins again: an unreadable lease is not taken over."""
    first = holder("job", "life 1")
    assert word(first) == "held"
    edit(tmp_path / LEASE, space="another machine")
    claim = lease.Claim(tmp_path, "job", "life 2")
    assert claim.poll(0.2) is None
    first.kill()
    gone = tmp_path.rename(tmp_path.with_name("away"))
    assert claim.poll(0.3) is None
    gone.rename(tmp_path)
    with monkeypatch.context() as patch:

        def fails(*_args):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        patch.setattr(lease_file, "read", fails)
        assert claim.poll(1.1 * EXPIRY_S) is None
    for error in ("[Errno 2]", "[Errno 5]"):
        assert caplog.text.count(f"waiting until its directory can be used: {error}") == 1
    began = time.monotonic()
    until(lambda: claim.poll(0.1)).close()
    assert time.monotonic() - began > 0.9 * EXPIRY_S


def test_the_silence_of_a_holder_counts_as_time_without_a_touch(tmp_path, holder):
    """After half of the time in silence, only the other half is waited for. A living holder touches
    its lease meanwhile, and keeps it."""
    first = holder("job", "life 1")
    assert word(first) == "held"
    edit(tmp_path / LEASE, space="another machine")
    claim = lease.Claim(tmp_path, "job", "life 2", silent_s=EXPIRY_S / 2)
    assert claim.poll(2 * EXPIRY_S) is None and ask(first) == "mine"
    first.kill()
    first.wait()
    claim = lease.Claim(tmp_path, "job", "life 2", silent_s=EXPIRY_S / 2)
    began = time.monotonic()
    until(lambda: claim.poll(0.05)).close()
    assert 0.4 * EXPIRY_S < time.monotonic() - began < 0.9 * EXPIRY_S


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"7", b"\xff\0", b'{"owner": 1}', b"x" * 9999])
def test_a_torn_or_foreign_lease_expires(tmp_path, acquire, caplog, monkeypatch, text):
    """An invalid lease is neither a crash nor a lock forever: it expires, with a warning."""
    monkeypatch.setattr(lease, "EXPIRY_S", 0.2)
    (tmp_path / LEASE).write_bytes(text)
    acquire().check()
    assert "the damaged" in caplog.text and caplog.text.count("waiting") == 1


def test_killed_at_every_system_call(tmp_path, acquire):
    """A process killed anywhere in a takeover does not block the next one."""
    take = f"Claim(Path({str(tmp_path)!r}), 'job', 'life 2', ['life 1']).poll(0)"
    for point in range(1, 30):
        acquire("job", "life 1").close()
        crashed = killed(point, "gptddp.run.lease", take)
        mine = acquire("job")
        mine.check()
        mine.close()
        assert os.listdir(tmp_path) == [LEASE]
        if not crashed:
            break
    assert 4 < point < 29


def test_an_unrenewable_lease_is_kept_with_a_warning(acquire, holder, monkeypatch, caplog):
    """On a read-only disk there is one warning, and the holder continues until another takes
    over."""
    mine = acquire("one at a:1")

    def fails(*_args):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", fails)
    until(lambda: "Read-only" in caplog.text)
    time.sleep(3 * PERIOD_S)
    mine.check()
    assert caplog.text.count("cannot be renewed") == 1
    second = holder("two at b:1")  # this process lives, but cannot touch its lease
    assert word(second) == "held"
    with pytest.raises(Superseded, match="two at b:1"):
        mine.check()
    until(lambda: mine.lost)


def test_a_lease_removed_or_damaged_by_hand_is_restored(acquire, holder):
    """The holder creates it again, or keeps renewing it: the run stays its own."""
    mine = acquire("one at a:1")
    mine.path.unlink()
    time.sleep(3 * PERIOD_S)
    assert word(holder("two at b:1")).startswith("refused: run")
    mine.path.write_text("{")
    assert "as long as another job renews" in waits(holder("two at b:1"))
    mine.check()


def test_an_unusable_directory_is_reported(tmp_path):
    """A folder in place of the lease is the user's mistake, not a traceback."""
    from gptddp.config import Config
    from gptddp.training.begin import take_run

    (tmp_path / LEASE).mkdir()
    world = type("World", (), {"job": None, "life": "1", "follows": frozenset()})
    config = Config(run_dir=str(tmp_path))
    with pytest.raises(ConfigError, match="cannot be used"):
        take_run(config, world)
