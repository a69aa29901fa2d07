"""Fixtures of the fault tests: jobs, undisturbed runs, and the book of what was measured."""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faulty_jobs import Fault, Job
from support.forked import train
from support.measurements import write_measurement
from support.owned import check_nobodys
from support.processes import ending
from support.toy import SMALL


@pytest.fixture(scope="module", autouse=True)
def rank_seconds(tmp_path_factory) -> Iterator[None]:
    """Of every run that the tests of a file have made, and however: they have owners."""

    def ledgers() -> set[Path]:
        return set(tmp_path_factory.getbasetemp().rglob("ledger.jsonl"))

    before = ledgers()
    yield
    for ledger in sorted(ledgers() - before):
        check_nobodys(ledger.parent)


@pytest.fixture(scope="module")
def jobs(corpus, tmp_path_factory):
    """Start a job: jobs(*trainer flags, **of Job). Nothing of it outlives the module."""

    def start(*flags: str, **options) -> Job:
        return Job(tmp_path_factory.mktemp("job"), corpus, *flags, **options)

    yield from ending(start, Job.close)


@pytest.fixture(scope="session")
def undisturbed(corpus, tmp_path_factory):
    """The run directory of a run that nobody disturbs: undisturbed(world size, *flags)."""

    @functools.cache
    def run(world: int, *flags: str) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed")
        if world == 1:
            train(1, *SMALL, "--data", str(corpus), "--run-dir", str(folder / "run"), *flags)
            return folder / "run"
        job = Job(folder, corpus, *flags, size=world, fewest=world, pause_s=0)
        try:
            job.finish()
        finally:
            job.close()
        return job.run

    return run


@pytest.fixture
def measured(request):
    """Note what a fault has cost: measured(what was done, fault, what happens)."""
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
    """strike(job, what, happens, world): do harm within it, to a world of `before` ranks.

    Then one of `world` ranks goes on. What it has cost is noted; no finished step is done again.
    """

    @contextlib.contextmanager
    def harm(
        job: Job,
        what: str,
        happens: str,
        world: int = 4,
        *,
        before: int | None = 4,
        new_life: bool = True,
        number: int | None = None,
    ) -> Iterator[Fault]:
        job.steady(before)
        with job.fault(world, new_life=new_life) as fault:
            yield fault
        measured(what, fault, happens, number)
        assert fault.redone == 0

    return harm
