"""Two jobs of one name on one run: in two networks, or a pod that is cut off and its replacement.

Every pod has a host name of its own, so that none can see whether the process in the lease lives,
as on machines of their own.
"""

import itertools
import os
import signal
import time

import pytest
from support.faulty_jobs import Fault, check_same_run, long
from support.namespaces import PREFIX, bridge, enter, inside

from gptddp.k8s.local.container import Network
from gptddp.run import lease
from gptddp.run.history import read_ledger

pytestmark = long
STEPS = ("--steps", "300", "--eval-every", "5000", "--checkpoint-every")
PAUSE_S = 0.3
WAITS = "waiting as long as job gptddp-"
CUT = (  # at once: whoever sends to the other side, or from it, is told that the connection is gone
    "INPUT -i eth0 -p tcp -j REJECT --reject-with tcp-reset",
    "OUTPUT -o eth0 -p tcp ! --tcp-flags RST RST -j REJECT --reject-with tcp-reset",
)
names = (f"host{i}" for i in itertools.count())


@pytest.fixture(scope="module")
def network():
    """A bridge and four namespaces with an address each."""
    with bridge(4):
        yield Network(PREFIX, 23000)


def starts(job):
    return [event for event in read_ledger(job.run) if event["event"] == "start"]


def log_of(*jobs):
    return "".join(pod.log.read_text() for job in jobs for pod in job.pods if pod.log.exists())


def together(jobs, true, what):
    """Wait for it while the controllers of all jobs work."""

    def both():
        for job in jobs[1:]:
            job.tick()
        return true()

    return jobs[0].until(both, what=what)


def rest(jobs, seconds):
    end = time.monotonic() + seconds
    together(jobs, lambda: time.monotonic() > end, "time")


@pytest.mark.fault(28)
def test_two_jobs_of_one_manifest_in_two_networks(jobs, network, tmp_path, undisturbed, measured):
    """Each sees itself as worker-0: the first trains on, also after the loss of a pod, the second
    says for whom it waits; it goes on when all pods of the first are lost, and the first waits."""
    local = Network(f"127.{10 + os.getpid() % 200}.254", 23000)
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{local.address(0)} gptddp-worker-0\n")

    def job(where, **options):
        return jobs(
            *(*STEPS, "2"),
            size=2,
            pause_s=PAUSE_S,
            network=local,
            within=lambda i: enter(where, hosts, next(names)),
            PET_RDZV_ENDPOINT=f"gptddp-worker-0:{local.port}",
            **options,
        )

    first = job(0)
    first.steady(2)
    with first.fault(2) as fault:
        first.kill(0)
    assert fault.redone == 0 and fault.source == "memory"
    second = job(1, runs=first.run.parent)
    both = first, second
    together(both, lambda: WAITS in log_of(second), "a word of who waits")
    lives, lines = len(starts(first)), len(first.lines())
    rest(both, 1.5 * lease.EXPIRY_S)
    assert len(starts(first)) == lives == 2 and len(first.lines()) > lines
    assert WAITS not in log_of(first) and "to see whether" not in log_of(first)

    first.hold(0, 1)
    first.kill(0, 1, back_s=3600)
    killed = time.time()
    together(both, lambda: len(starts(first)) > lives, "a life of the second job")
    seconds = starts(first)[-1]["time"] - killed
    measured(
        "all pods of a job lost while another of its name waits",
        Fault(seconds, starts(first)[-1]["redo"], 1, starts(first)[-1]["source"]),
        "that one goes on after 12 s, from the newest checkpoint",
    )
    first.bring_back(0, 1)
    together(both, lambda: WAITS in log_of(first), "a word of who waits")
    rest(both, 1.5 * lease.EXPIRY_S)
    assert len(starts(first)) == lives + 1
    second.finish()
    first.finish()
    check_same_run(first, undisturbed(1, *STEPS, "2"))


@pytest.fixture
def halves(jobs, network, tmp_path):
    """A job of three, and a function that starts a replacement of its worker 0 in a fourth place.

    The name of worker 0 is always itself for the old one, and for the others what the test says.
    """
    own, others = tmp_path / "own", tmp_path / "others"

    def host(path, i):
        path.write_text(f"127.0.0.1 localhost\n{PREFIX}.{100 + i} gptddp-worker-0\n")

    def begin(spaces, **options):
        return jobs(
            *(*STEPS, "3600"),
            size=3,
            pause_s=PAUSE_S,
            network=network,
            within=lambda i: enter(spaces[i], others if spaces[i] else own, next(names)),
            GLOO_SOCKET_IFNAME="eth0",
            PET_RDZV_ENDPOINT=f"gptddp-worker-0:{network.port}",
            **options,
        )

    def replace():
        host(others, 3)
        another = begin((3, 1, 2), runs=job.run.parent, POD_ADDRESS=f"{PREFIX}.103")
        another.hold(1, 2)
        return another

    host(own, 0)
    host(others, 0)
    job = begin((0, 1, 2))
    job.steady(3)
    yield job, replace
    for rule in CUT:
        inside(0, f"iptables -D {rule}")


def ended(job, undisturbed):
    """The run comes to its end, and is that of a job that nobody disturbs."""
    check_same_run(job, undisturbed(1, *STEPS, "3600"))


@pytest.mark.fault(28)
def test_a_worker_0_that_is_cut_off_trains_on_and_its_replacement_waits(halves, undisturbed):
    """With the run's storage in reach it goes on alone. The replacement and the other pods say for
    whom they wait; they go on from their snapshots when it is gone."""
    job, replace = halves
    for rule in CUT:
        inside(0, f"iptables -A {rule}")
    job.steady(1)
    another = replace()
    both = job, another
    together(both, lambda: WAITS in log_of(*both), "a word of who waits")
    lives = len(starts(job))
    job.steady(1)
    rest(both, 1.5 * lease.EXPIRY_S)
    assert len(starts(job)) == lives == 2 and starts(job)[-1]["redo"] == 0
    assert WAITS not in job.pods[0].log.read_text()
    job.hold(0)
    job.kill(0, back_s=3600)
    together(both, lambda: job.lines()[-1][1]["world_size"] == 3, "a world of the others")
    assert starts(job)[-1]["source"] == "memory" and len(starts(job)) == 3
    for it in both:
        it.pause(0)
    together(both, lambda: (job.run / "finished.json").exists(), "the end of the run")
    ended(job, undisturbed)


@pytest.mark.fault(28)
def test_a_worker_0_that_comes_back_beside_its_replacement_waits(halves, undisturbed):
    """Its machine stood still while the others went on with the replacement: it commits nothing,
    says for whom it waits, and goes on from its own snapshot where all of them are lost."""
    job, replace = halves
    for rule in CUT:
        inside(0, f"iptables -A {rule}")
    worker, launcher = job.worker(0), job.pid(0)
    for pid in (launcher, worker):
        os.kill(pid, signal.SIGSTOP)
    another = replace()
    both = job, another
    together(
        both,
        lambda: len(starts(job)) > 1 and job.lines()[-1][1]["world_size"] == 3,
        "a world with the replacement",
    )
    assert starts(job)[-1]["source"] == "memory" and starts(job)[-1]["redo"] == 0
    lives = len(starts(job))
    for pid in (worker, launcher):
        os.kill(pid, signal.SIGCONT)
    together(both, lambda: WAITS in job.pods[0].log.read_text(), "a word of who waits")
    rest(both, 1.5 * lease.EXPIRY_S)
    assert len(starts(job)) == lives
    job.hold(1, 2)
    job.kill(1, 2, back_s=3600)
    another.hold(0)
    another.kill(0, back_s=3600)
    together(both, lambda: len(starts(job)) > lives, "a life of the old worker 0")
    assert starts(job)[-1]["world_size"] == 1 and starts(job)[-1]["source"] == "memory"
    job.pause(0)
    together(both, lambda: (job.run / "finished.json").exists(), "the end of the run")
    ended(job, undisturbed)
