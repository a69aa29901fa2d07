"""Fixtures of the fault tests: jobs, undisturbed runs, and records of the measurements."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faulty_jobs import Fault, Job, check_same_run
from support.forked import train
from support.measurements import write_measurement
from support.owned import check_nobodys
from support.processes import ending
from support.toy import SMALL


@pytest.fixture(scope="module", autouse=True)
def rank_seconds(tmp_path_factory) -> Iterator[None]:
    """Check each run that the tests of a file have made: every rank-second has an owner."""

    def ledgers() -> set[Path]:
        return set(tmp_path_factory.getbasetemp().rglob("ledger.jsonl"))

    before = ledgers()
    yield
    for ledger in sorted(ledgers() - before):
        check_nobodys(ledger.parent)


@pytest.fixture(scope="module")
def jobs(corpus, tmp_path_factory):
    """Start a job: jobs(*trainer flags, **of Job). Nothing of it outlives the module."""

    def start(*flags: str, data: Path = corpus, **options) -> Job:
        return Job(tmp_path_factory.mktemp("job"), data, *flags, **options)

    yield from ending(start, Job.close)


@pytest.fixture(scope="session")
def undisturbed(corpus, tmp_path_factory):
    """undisturbed(*flags): the directory of a run of one process, without faults."""

    @functools.cache
    def run(*flags: str, data: Path = corpus) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed")
        train(1, *SMALL, "--data", str(data), "--run-dir", str(folder / "run"), *flags)
        return folder / "run"

    return run


@pytest.fixture
def ends_undisturbed(undisturbed):
    """ends_undisturbed(job): finish the job; its run must have the bits of an undisturbed run."""

    def check(job: Job) -> None:
        job.finish()
        check_same_run(job, undisturbed(*job.flags, "--steps", str(job.last()), data=job.data))

    return check


@pytest.fixture
def measured(request):
    """measured(what was done, fault, what happens): record what the fault has cost."""
    marked = request.node.get_closest_marker("fault").args[0]

    def note(what: str, fault: Fault, happens: str, number: int | None = None) -> None:
        write_measurement(
            "measured.jsonl",
            fault=number or marked,
            what=what,
            happens=happens,
            test=request.node.nodeid.split("[")[0],
            **vars(fault),
        )

    return note


@pytest.fixture
def strike(measured):
    """strike(job, what, happens, *pods): a context in which a test harms these pods or workers.

    The world must shrink from `before` ranks (all of the job) to `world` (all but the lost ones),
    and then grow to its full size, unless `stays`. The seconds of both changes are recorded; with
    `longest`, the longest pause. All other workers must stay the same processes, no life may begin,
    and no step may be done again.
    """

    @contextlib.contextmanager
    def harm(
        job: Job,
        what: str,
        happens: str,
        *lost: int,
        before: int | None = None,
        world: int | None = None,
        stays: bool = False,
        longest: bool = False,
        number: int | None = None,
    ) -> Iterator[Fault]:
        job.steady(before)
        first, old = job.last(), before or job.size
        kept = {i: pid for i, pid in job.workers().items() if i not in lost}
        step_s = job.step_s()
        with job.fault(world or old - len(lost)) as fault:
            yield fault
        if not stays:
            job.steady()
        if longest:
            fault.seconds = job.longest_s(first)
        elif not stays and world != old:
            fault.back_s = job.entered(step_s)
        measured(what, fault, happens, number)
        assert {i: job.worker(i) for i in kept} == kept
        assert (fault.redone, fault.lives) == (0, 0)

    return harm
