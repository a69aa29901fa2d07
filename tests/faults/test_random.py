"""Random kinds of kills, at random times, in runs with Muon, dropout, bf16 and quarantine."""

import math
import os
import random
import shutil
import signal

import pytest
from support.faulty_jobs import SHORT, long
from support.prepared import flip

from gptddp.data import lanes
from gptddp.data.dataset import open_dataset

FLAGS = ("--optimizer", "muon", "--lr", "0.01", "--dropout", "0.1", "--precision", "bf16")
FLAGS += ("--on-bad", "quarantine", "--checkpoint-every", "5", "--eval-every", "40")
KILLS = 6 if SHORT else 75
PATIENCE_S = 60.0  # limit for the next step after any kill


def stopped(job, i):
    pid = job.worker(i)
    os.kill(pid, signal.SIGSTOP)
    job.wait(random.uniform(0, 6))
    os.kill(pid, signal.SIGCONT)


def back_later(job, i):
    job.kill(i, back_s=random.uniform(1, 10))


def told(job, i):
    job.stop(i)
    job.wait(random.uniform(0, 3))
    job.bring_back(i)


def at(place):
    """Kill a pod when its worker reaches `place`, after the loss of another worker or later."""

    def harm(job, i):
        job.order(i, place)
        job.shoot(i if place == "join" else (i + 1) % job.size)

    return harm


HARM = {
    "worker": lambda job, i: job.shoot(i),
    "pod": lambda job, i: job.kill(i),
    "launcher": lambda job, i: os.kill(job.pid(i), signal.SIGKILL),
    "pod, back later": back_later,
    "worker stopped": stopped,
    "pod told to stop": told,
    "in a re-form": at("form"),
    "at the join": at("join"),
    "in a save": at("commit"),
    "two": lambda job, i: (job.kill(i), job.shoot((i + 1) % job.size)),
}


@pytest.fixture(scope="module")
def data(corpus, tmp_path_factory):
    """The corpus, with a row group that cannot be read."""
    folder = shutil.copytree(corpus, tmp_path_factory.mktemp("flipped") / "data")
    dataset = open_dataset(folder)
    sizes = [group.tokens for group in dataset.row_groups("train")]
    flip(dataset, lanes.deal(sizes, 8, 1337)[5][-1].group)
    return folder


@pytest.mark.fault(7)
@pytest.mark.parametrize("size", [3, *(pytest.param(it, marks=long) for it in (4, 7, 2))])
def test_random_kills_change_no_bit(jobs, data, ends_undisturbed, size):
    """After each kill a step is done within a minute; the run has the bits of one process."""
    seed = int(os.environ.get("SEED", random.getrandbits(32)))
    print(f"SEED={seed}")
    random.seed(seed)
    job = jobs(*FLAGS, size=size, data=data)
    job.steady()
    for _ in range(KILLS):
        there = [i for i, pod in enumerate(job.pods) if pod.process]
        there = there or list(range(size))
        kind, i, last = random.choice([*HARM]), random.choice(there), job.last()
        print(f"step {last}: {kind} {i}", flush=True)
        HARM[kind](job, i)
        job.until(lambda last=last: job.last() > last + 1, PATIENCE_S, f"a step after {kind}")
        job.wait(random.uniform(0, 3))
        for back_at in [i for i, at in job.back_at.items() if at == math.inf]:
            job.bring_back(back_at)
    for order in job.orders.glob("*"):
        if order.suffix in (".form", ".join", ".commit"):
            order.unlink()
    ends_undisturbed(job)


@pytest.mark.fault(7)
@long
def test_a_job_starts_despite_kills_from_the_first_second(jobs, ends_undisturbed):
    """A kill every four seconds, also before the first step, does not keep a job from its steps."""
    job = jobs()
    for _ in range(12):
        job.wait(4)
        there = [i for i, pod in enumerate(job.pods) if pod.process]
        random.choice([job.kill, job.shoot])(random.choice(there or [0]))
    assert job.last() > 20
    ends_undisturbed(job)
