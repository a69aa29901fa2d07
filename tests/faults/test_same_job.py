"""Two jobs of one name on one run, in two networks; and a worker-0 whose connections are reset.

Every pod has its own host name, as if on its own machine, so that no pod can see whether the
process in the lease is alive.
"""

import itertools
import os
import time

import pytest
from support.faulty_jobs import Fault, long
from support.namespaces import PREFIX, bridge, enter, inside

from gptddp.k8s.local.container import Network
from gptddp.run import lease
from gptddp.run.history import read_ledger

pytestmark = long
STEPS = ("--steps", "300", "--checkpoint-every")
PAUSE_S = 0.3
WAITS = "waiting as long as job gptddp-"
CUT = (  # at once: a sender on either side gets a TCP reset
    "INPUT -i eth0 -p tcp -j REJECT --reject-with tcp-reset",
    "OUTPUT -o eth0 -p tcp ! --tcp-flags RST RST -j REJECT --reject-with tcp-reset",
)
names = (f"host{i}" for i in itertools.count())


@pytest.fixture(scope="module")
def network():
    """A bridge, and four namespaces with one address each."""
    with bridge(4):
        yield Network(PREFIX, 23000)


def log_of(*jobs):
    return "".join(pod.log.read_text() for job in jobs for pod in job.pods if pod.log.exists())


def together(jobs, true, what):
    """Wait until `true()`, while the controllers of all jobs work."""

    def both():
        for job in jobs[1:]:
            job.tick()
        return true()

    return jobs[0].until(both, what=what)


def rest(jobs, seconds):
    end = time.monotonic() + seconds
    together(jobs, lambda: time.monotonic() > end, "time")


@pytest.mark.fault(28)
def test_two_jobs_of_one_manifest_in_two_networks(
    jobs, network, tmp_path, ends_undisturbed, measured
):
    """Each job finds itself as worker-0. The first continues, also after the loss of a pod, while
    the second waits and logs for which job. When the first loses all pods, they change roles."""
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
    first.steady()
    with first.fault(1) as fault:
        first.kill(0)
    assert (fault.redone, fault.lives) == (0, 0)
    first.steady()
    second = job(1, runs=first.run.parent)
    both = first, second
    together(both, lambda: WAITS in log_of(second), "a word of who waits")
    lives, last = len(first.lives()), first.last()
    rest(both, 1.5 * lease.EXPIRY_S)
    assert len(first.lives()) == lives == 1 and first.last() > last
    assert WAITS not in log_of(first)

    first.hold(0, 1)
    first.kill(0, 1, back_s=3600)
    killed = time.time()
    together(both, lambda: len(first.lives()) > lives, "a life of the second job")
    start = first.lives()[-1]
    measured(
        "all pods of a job lost while a job of the same name waits",
        Fault(start["time"] - killed, redone=start["redo"], lives=1),
        "resume by the other after 12 s",
    )
    first.bring_back(0, 1)
    together(both, lambda: WAITS in log_of(first), "a word of who waits")
    rest(both, 1.5 * lease.EXPIRY_S)
    assert len(first.lives()) == lives + 1
    second.finish()
    ends_undisturbed(first)


@pytest.mark.fault(17)
def test_a_worker_0_whose_connections_are_reset_is_dropped(
    jobs, network, tmp_path, ends_undisturbed
):
    """Resets do not prove that it is dead: the two others continue as the majority. Only one side
    writes, and when the network is mended, all form one world."""
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost\n{PREFIX}.100 gptddp-worker-0\n")
    job = jobs(
        size=3,
        pause_s=PAUSE_S,
        network=network,
        within=lambda i: enter(i, hosts, next(names)),
        GLOO_SOCKET_IFNAME="eth0",
        PET_RDZV_ENDPOINT=f"gptddp-worker-0:{network.port}",
    )
    job.steady()
    for rule in CUT:
        inside(0, f"iptables -A {rule}")
    first = job.last()
    job.wait(2 * lease.EXPIRY_S)
    worlds = {line["world_size"] for line in job.lines(job.last() - 5)}
    assert job.last() > first + 5 and len(worlds) == 1
    for rule in CUT:
        inside(0, f"iptables -D {rule}")
    job.steady()
    events = [it for it in read_ledger(job.run) if it["event"] == "start"]
    assert len({it["generation"] for it in events}) == len(events)
    ends_undisturbed(job)
