"""Silent peers: stopped for a while, busy, or hanging in Python or in C."""

import contextlib
import math
import os
import signal
import time
from collections.abc import Iterator

import pytest
from support.faulty_jobs import long
from support.launchers import Training, undisturbed
from support.processes import alive
from support.same_bits import check_same_lines
from support.waiting import until

from gptddp.run import lease

DROPPED = "its launcher reports it", "dropped"
BACK_S = 30.0  # limit for the return of a pod after SIGCONT, several times what it takes
BUSY_S = 10


@pytest.fixture(scope="module")
def job(jobs):
    it = jobs()
    it.steady()
    return it


@contextlib.contextmanager
def stopped(job, i: int, whole_pod: bool) -> Iterator[None]:
    """SIGSTOP for the pod's worker, or for all of its processes; SIGCONT at the end."""
    launcher, worker = job.pid(i), job.worker(i)
    tell = (lambda it: os.killpg(launcher, it)) if whole_pod else (lambda it: os.kill(worker, it))
    tell(signal.SIGSTOP)
    try:
        yield
    finally:
        tell(signal.SIGCONT)


STOPS = [
    pytest.param(True, 2, 8, marks=long),
    (False, 2, 8),
    (True, 0, 8),
    pytest.param(False, 0, 8, marks=long),
    pytest.param(True, 2, 20, marks=long),
    pytest.param(False, 2, 20, marks=long),
    pytest.param(True, 2, 75, marks=long),
    pytest.param(False, 2, 75, marks=long),
]


@pytest.mark.fault(13)
@pytest.mark.parametrize(("whole_pod", "rank", "seconds"), STOPS)
def test_a_stopped_rank_is_dropped_and_joins_again(job, strike, whole_pod, rank, seconds):
    """It is dropped within seconds. After SIGCONT it cannot write, and joins again: in the same
    process, unless it was rank 0."""
    job.steady()
    what = f"{'pod' if whole_pod else 'worker'} stopped (SIGSTOP)"
    name, which = f"a {what}" if rank else f"rank 0's {what}", job.by_rank(rank)
    pid, begin, known = job.worker(which), time.monotonic(), len(job.worlds())
    with contextlib.ExitStack() as asleep:
        with strike(job, name, DROPPED[whole_pod], which, stays=True):
            asleep.enter_context(stopped(job, which, whole_pod))
        job.wait(max(0.0, begin + seconds - time.monotonic()))
        assert job.lost(known) == {f"gptddp-worker-{which}"}
    woken = time.monotonic()
    job.until(lambda: job.lines(job.last())[-1]["world_size"] == 4, BACK_S, "its return")
    print(f"{name} for {seconds} s is back after {time.monotonic() - woken:.1f} s")
    assert rank == 0 or job.worker(which) == pid


@pytest.mark.fault(13)
@pytest.mark.parametrize("seconds", [1, pytest.param(3, marks=long)])
def test_a_short_stop_is_waited_for(job, strike, seconds):
    """A pod that is stopped for a second is not dropped."""
    job.steady()
    known = len(job.worlds())
    what = f"a pod stopped for {seconds} s (SIGSTOP)", "wait"
    with strike(job, *what, world=4), stopped(job, 2, True):
        job.wait(seconds)
    assert len(job.worlds()) == known or seconds > 2


@pytest.mark.fault(13)
def test_a_stopped_launcher_counts_as_a_stopped_pod(job, strike):
    """Its worker is dropped with it, and joins again in the same process."""
    job.steady()
    which = job.by_rank(2)
    pid, launcher = job.worker(which), job.pid(which)
    with strike(job, "a pod's launcher stopped (SIGSTOP)", DROPPED[1], which, stays=True):
        os.kill(launcher, signal.SIGSTOP)
        job.steady(3)
        os.kill(launcher, signal.SIGCONT)
    job.until(lambda: job.lines(job.last())[-1]["world_size"] == 4, BACK_S, "its return")
    assert job.worker(which) == pid


@pytest.mark.fault(14)
def test_a_worker_that_holds_the_gil_is_waited_for(job):
    """The others wait for it for ten seconds, as its launcher answers in its place."""
    job.steady()
    known, pids = len(job.worlds()), job.workers()
    done = job.order(3, "busy")
    job.until(done.exists)
    began, last = time.monotonic(), job.last()
    job.until(lambda: job.last() > last + 3)
    assert time.monotonic() - began > BUSY_S / 2
    assert len(job.worlds()) == known and job.workers() == pids


@pytest.mark.fault(13)
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=long)])
def test_the_lease_decides_a_tie(job, strike, rank):
    """One of two pods is stopped, so neither is a majority. The other continues once it has the
    lease; only one of them writes, and the stopped one joins again."""
    job.steady()
    job.hold(0, 1)
    job.kill(0, 1, back_s=math.inf)
    job.steady(2)
    which, whose = job.by_rank(rank), "not the lease's holder" if rank else "the lease's holder"
    pid = job.worker(which)
    tie = f"one of two pods stopped, {whose}", "the lease decides"
    with (  # SIGCONT comes after the strike
        contextlib.ExitStack() as asleep,
        strike(job, *tie, which, before=2, stays=True) as fault,
    ):
        asleep.enter_context(stopped(job, which, True))
    assert fault.seconds < 3 * lease.EXPIRY_S and (rank or fault.seconds > lease.EXPIRY_S / 2)
    job.steady(2)
    assert rank == 0 or job.worker(which) == pid
    job.bring_back(0, 1)
    job.steady()


def test_the_run_equals_an_undisturbed_run(job, ends_undisturbed):
    """After all these faults, the run has the bits of an undisturbed one."""
    ends_undisturbed(job)


# -- hangs, with short limits ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def running(corpus, tmp_path_factory) -> Iterator[Training]:
    folder = tmp_path_factory.mktemp("hung") / "job"
    job = Training(folder, corpus, 3, 21, 2, "--steps", "1000000", "--checkpoint-every", "3600")
    job.before = "from gptddp.launch import worker; worker.LATER_S = 1.0; "
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HANG_MARGIN_S", "4")
        yield job
    job.close()


@pytest.fixture
def three(running: Training) -> Training:
    """The job with all its ranks, whatever the previous test has done to it."""
    running.whole()
    return running


@pytest.mark.fault(14)
@pytest.mark.parametrize(
    ("fault", "frame"),
    [
        ("sleep", "sleep (faulty_worker.py:"),
        pytest.param("spin", "spin (faulty_", marks=long),
        ("stick", "stick (faulty_"),
    ],
)
def test_a_rank_that_hangs_logs_its_stack_and_is_replaced(three, fault, frame):
    """Its pod logs where it hangs, with or without the GIL, and ends it; the others continue."""
    mark, old, others = len(three.log(1)), three.worker(1), (three.worker(0), three.worker(2))
    three.order(1, fault)
    until(lambda: three.worker(1) != old, "a new worker")
    three.goes_on(3)
    assert f"hangs in {frame}" in three.log(1)[mark:]
    assert not alive(old) and others == (three.worker(0), three.worker(2))


@pytest.mark.fault(14)
def test_ranks_that_all_hang_waiting_for_data_are_replaced(three):
    """No rank is in a collective, so no peer notices. The missing heartbeat ends each rank, and the
    next life continues from the last commit."""
    old = [three.worker(i) for i in range(3)]
    step = three.steps()[-1]["step"] + 40  # one step for all, which no rank has reached yet
    for i in range(3):
        three.order(i, "starve", str(step))
    until(lambda: all(three.worker(i) != old[i] for i in range(3)), "new workers")
    three.goes_on(3)
    assert " hangs in next_batch (faulty_worker.py:" in three.log(0)


def test_the_run_of_three_pods_equals_an_undisturbed_run(three, corpus, tmp_path):
    """After these hangs no step is missing, and every bit is right."""
    assert [pod.poll() for pod in three.pods.values()] == [None] * 3
    lines = three.steps()
    check_same_lines(lines, undisturbed(tmp_path / "run", corpus, 1, lines[-1]["step"]))
