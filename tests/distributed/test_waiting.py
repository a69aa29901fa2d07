"""The other ranks wait while rank 0 reads, and end if it hangs, is stopped or dies."""

import os
import re
import signal
import time

import pytest
from support.forked import Forked, ranks
from support.waiting import until

from gptddp.distributed import storage

# Rank 0 acts by the first flag; the second is the time limit in seconds. Rank 1 is the first of
# another pod.
CODE = """
import logging, os, sys, time
from gptddp import errors
from gptddp.distributed import connect, pulse, storage, waiting
from gptddp.distributed.connect import connect as join
from gptddp.distributed.process import exit_now
logging.basicConfig(format="%(message)s", level=logging.INFO)
if os.environ["RANK"] == "1":
    os.environ["LOCAL_RANK"] = "0"
waiting.TELL_S, storage.FIRST_LINE_S, storage.NEXT_LINE_S = 0.1, 1.0, 1.0
def work(tell):
    if sys.argv[1] == "read":
        for i in range(45):
            tell(f"reading {i} of 45")
            time.sleep(0.1)
    elif sys.argv[1] == "raise":
        raise OSError(5, "Input/output error", "/runs/it")
    elif sys.argv[1] == "refuse":
        time.sleep(0.5)
        raise errors.DataError("no such data")
    else:
        tell("reading 1 of 60\\n\\033[31mred")
        time.sleep(600)
    return sys.argv[1]
try:
    with pulse.Listening(lambda where: 1), join("cpu") as world:
        connect.FIRST_TIMEOUT_S, pulse.MARGIN_S = float(sys.argv[2]), 0.5
        if world.rank:
            pulse.allow(connect.FIRST_TIMEOUT_S)
        print("joined", file=sys.stderr, flush=True)
        print("got", world.from_rank_0(work), file=sys.stderr)
        world.leave_together()
except errors.GptddpError as error:
    print(type(error).__name__, error, file=sys.stderr)
    exit_now(error.exit_code)
except OSError:
    time.sleep(600)  # its end takes its time
except errors.LifeLost as error:
    print(type(error).__name__, error, file=sys.stderr)
    exit_now(1)
"""


@pytest.fixture
def world():
    """world(what, limit_s): three ranks, rank 0 acts by `what`; killed at the end."""
    started: list[Forked] = []

    def begin(what: str, limit_s: float = 1.5) -> list[Forked]:
        started.extend(ranks(3, what, str(limit_s), code=CODE))
        return started[-3:]

    yield begin
    for process in started:
        process.kill()


def joined(processes: list[Forked]) -> None:
    """Wait until all ranks have joined."""
    until(lambda: all("joined" in it.stderr.path.read_text() for it in processes))


def test_the_ranks_wait_for_a_read_of_three_times_the_limit(world):
    """All ranks get the result. Rank 0, and one rank of each other pod, report the progress at
    intervals, not at every change."""
    said = []
    for it in world("read"):
        assert it.wait(60) == 0, it.stderr.read()
        err = it.stderr.read()
        assert "got read" in err
        said.append([line for line in err.splitlines() if " of 45 (" in line])
    assert [len(lines) > 0 for lines in said] == [True, True, False]
    assert said[0][0].startswith("[rank 0] this life begins: reading ")
    assert said[1][0].startswith("[rank 1] waiting for rank 0: reading ")
    assert len(said[0]) < 8 and len(said[1]) < 8


def test_a_start_reports_its_progress(run, monkeypatch, caplog):
    """The log says how much of the checkpoint is read, for ranks that wait for a slow volume."""
    assert run("--steps", "2") == 0
    monkeypatch.setattr(storage, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(storage, "NEXT_LINE_S", 0.0)
    caplog.set_level("INFO")
    assert run("--steps", "4") == 0
    assert "reading step-000000000002.1, 0.00 of " in caplog.text


def test_a_read_that_hangs_is_noticed_by_all(world):
    """All ranks end after the limit without progress. No control character of a peer is shown."""
    for it in world("hang")[1:]:
        assert it.wait(60) == 1
        err = it.stderr.read()
        assert "LostPeer rank 0 has made no progress for 1.5 s: reading 1 of 60" in err, err
        assert "\033" not in err


def test_the_death_of_rank_0_is_noticed_at_once(world):
    """The waiting ranks notice the death during the read, and not after the limit of a minute."""
    processes = world("hang", 60)
    joined(processes)
    time.sleep(0.5)
    processes[0].kill()
    killed = time.monotonic()
    for it in processes[1:]:
        assert it.wait(60) == 1
    assert time.monotonic() - killed < 10
    assert "rank 0 is lost" in processes[1].stderr.read()


def test_a_rank_0_that_is_stopped_is_noticed(world):
    """The store of a stopped rank 0 does not answer, and torch waits: the pulse ends the peers."""
    processes = world("hang")
    joined(processes)
    os.kill(processes[0].pid, signal.SIGSTOP)
    for it in processes[1:]:
        assert it.wait(60) == 1
        assert re.search(r"no progress for 2 s: hangs in \w+ \(connect.py:", it.stderr.read())


def test_an_error_of_rank_0_ends_all(world):
    """All ranks raise a user's mistake, with its exit code; an error of the volume ends the life of
    all at once, and all report it."""
    refused, failed = world("refuse", 60), world("raise", 60)
    for it in refused:
        assert it.wait(60) == 2, it.stderr.read()
        assert "DataError no such data" in it.stderr.read()
    for it in failed[1:]:
        assert it.wait(60) == 1
        assert "rank 0 has failed: OSError: [Errno 5]" in it.stderr.read()
