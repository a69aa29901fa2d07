"""Pods in network namespaces on a bridge: cut, slow and lossy links, unresolved names."""

import contextlib
import subprocess
import sys
import time

import pytest
from support.faulty_jobs import SHORT, long
from support.namespaces import NAME, PREFIX, bridge, enter, inside, sh
from support.paths import SUPPORT

from gptddp.k8s.local.container import Network


@pytest.fixture(scope="module")
def network():
    """A bridge, and four namespaces with one address each."""
    with bridge(4):
        yield Network(PREFIX, 23000)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """The /etc/hosts of the pods, with the name of the rendezvous."""
    path = tmp_path_factory.mktemp("dns") / "hosts"
    path.write_text(HOSTS)
    return path


HOSTS = f"127.0.0.1 localhost\n{PREFIX}.100 gptddp-worker-0\n"


@pytest.fixture(scope="module")
def job(jobs, network, hosts):
    """Four pods in their namespaces, which find the rendezvous by its name."""

    it = jobs(
        network=network,
        within=lambda i: enter(i, hosts),
        GLOO_SOCKET_IFNAME="eth0",
        PET_RDZV_ENDPOINT=f"gptddp-worker-0:{network.port}",
    )
    it.steady()
    return it


def link(i: int, state: str) -> None:
    sh(f"ip -n {NAME} link set pod{i} {state}")


OUT = "dropped"


@contextlib.contextmanager
def cut(job, strike, what: str, *lost: int, world: int, on, off, happens: str = OUT):
    """Cut the network, wait for the smaller world, mend the network, wait for all pods."""
    pids = job.workers()
    with strike(job, what, happens, *lost, world=world, stays=True):
        on()
    yield
    off()
    job.steady()
    assert job.workers() == pids


@pytest.mark.fault(15)
@pytest.mark.parametrize("seconds", [1, pytest.param(3, marks=long)])
def test_a_link_that_is_down_for_a_moment_changes_no_world(job, seconds):
    """The others wait for its pod."""
    job.steady()
    known = len(job.worlds())
    link(2, "down")
    job.wait(seconds)
    link(2, "up")
    job.steady()
    assert len(job.worlds()) == known


@pytest.mark.fault(15)
@pytest.mark.parametrize("seconds", [8, pytest.param(100, marks=long)])
@pytest.mark.parametrize(
    "which", [pytest.param(2, id="pod"), pytest.param(0, id="host", marks=long)]
)
def test_a_pod_whose_link_is_down_is_dropped_and_joins_again(job, strike, which, seconds):
    """The dropped pod does no steps, and joins again in the same process."""
    name = "worker-0's" if which == 0 else "a pod's"
    down, up = (lambda: link(which, "down")), (lambda: link(which, "up"))
    with cut(job, strike, f"{name} link is down", which, world=3, on=down, off=up):
        job.wait(seconds - 5)


@pytest.mark.fault(17)
def test_a_pod_that_receives_but_cannot_send_is_dropped(job, strike):
    """In an asymmetric partition the others form a world without the pod; there is no deadlock."""
    on = f"iptables -A OUTPUT -d {PREFIX}.0/24 -j DROP"
    what = "a pod hears but is not heard"
    both = {"on": lambda: inside(2, on), "off": lambda: inside(2, "iptables -F OUTPUT")}
    with cut(job, strike, what, 2, world=3, **both):
        job.wait(1)


@pytest.mark.fault(17)
def test_of_two_pods_that_cannot_connect_one_is_dropped(job, strike):
    """Both reach the other two pods: the one of the higher rank is dropped."""
    on = f"iptables -A OUTPUT -d {PREFIX}.103 -j DROP"
    what = "two pods do not hear each other"
    both = {"on": lambda: inside(2, on), "off": lambda: inside(2, "iptables -F OUTPUT")}
    with cut(job, strike, what, world=3, happens="one dropped", **both):
        job.wait(3)


@pytest.mark.fault(17)
def test_the_lease_decides_between_halves_of_a_network(job, strike):
    """The two pods with the lease continue, the others wait; in the end all form one world."""
    hosts = [f"{PREFIX}.{100 + i}" for i in range(4)]

    def on() -> None:
        for i, j in ((0, 2), (0, 3), (1, 2), (1, 3)):
            for one, other in ((i, j), (j, i)):
                inside(one, f"iptables -A OUTPUT -d {hosts[other]} -j DROP")

    def off() -> None:
        for i in range(4):
            inside(i, "iptables -F OUTPUT")

    halves = "a network split into halves", "the lease decides"
    with cut(job, strike, halves[0], world=2, on=on, off=off, happens=halves[1]):
        job.wait(3 if SHORT else 40)
    assert len(job.lives()) == 1


LOSS = "iptables -A INPUT -m statistic --mode random --probability {} -j DROP"
BAD_STEPS = 3 if SHORT else 8  # while the link is bad
TROUBLES = [
    ("1 % packet loss", LOSS.format(0.01), "iptables -F INPUT"),
    ("20 % packet loss", LOSS.format(0.2), "iptables -F INPUT"),
    (
        "1 Mbit/s",
        "tc qdisc add dev eth0 root tbf rate 1mbit burst 8k latency 200ms",
        "tc qdisc del dev eth0 root",
    ),
]


@pytest.mark.fault(16)
@pytest.mark.parametrize(("trouble", "on", "off"), TROUBLES, ids=["loss-1", "loss-20", "slow"])
def test_a_bad_link_slows_steps_and_drops_no_pod(job, measured, trouble, on, off):
    """Steps take longer; no world changes."""
    job.steady()
    known = len(job.worlds())
    with job.fault() as fault:
        inside(3, on)
        before = time.monotonic()
        job.steady(steps=BAD_STEPS)
        step_s = (time.monotonic() - before) / BAD_STEPS
        inside(3, off)
        job.began = time.time()
    measured(f"{trouble} at one pod", fault, f"steps of {step_s:.1f} s")
    assert len(job.worlds()) == known


@contextlib.contextmanager
def far_away(i: int, seconds: float):
    """Delay each frame between a pod and the bridge by `seconds`, in both directions."""
    link = f"ip -n {NAME} link"
    sh(f"{link} add near type veth peer name far && {link} set near up && {link} set far up")
    delay = [sys.executable, SUPPORT / "delayed_link.py", f"pod{i}", "near", str(seconds)]
    try:
        with subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{NAME}", *delay],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as relay:
            assert relay.stdout.readline()
            sh(f"{link} set pod{i} nomaster && {link} set far master bridge")
            yield
            assert relay.poll() is None
    finally:
        sh(f"{link} del far && {link} set pod{i} master bridge")


@pytest.mark.fault(16)
@long
def test_latency_slows_steps_and_drops_no_pod(job, measured):
    """Steps take longer while a pod's frames are 200 ms late each way; no world changes."""
    job.steady()
    known, near_s = len(job.worlds()), job.step_s()
    with job.fault() as fault:
        with far_away(3, 0.2):
            before = time.monotonic()
            job.steady(steps=8)
            far_s = (time.monotonic() - before) / 8
        job.began = time.time()
    measured(
        "each frame 200 ms late, to and from one pod",
        fault,
        f"steps of {far_s:.1f} s instead of {near_s:.1f} s",
    )
    assert len(job.worlds()) == known
    assert far_s > 0.2  # a step needs the gradients of all ranks


@pytest.mark.fault(33)
def test_a_new_pod_waits_for_a_name_that_does_not_resolve(job, hosts, measured):
    """A pod that comes back while the name of the rendezvous does not resolve waits for it."""
    job.steady()
    seconds = 5 if SHORT else 30
    hosts.write_text("127.0.0.1 localhost\n")
    job.kill(2)
    job.wait(seconds)
    with job.fault() as fault:
        hosts.write_text(HOSTS)
    happens = "the pod waits; seconds from the repair until it trains"
    what = f"a pod killed, the rendezvous name unresolved for {seconds} s"
    measured(what, fault, happens)
    assert (fault.redone, fault.lives) == (0, 0)


def test_the_run_equals_an_undisturbed_run(job, ends_undisturbed):
    """After all these faults, the run has the bits of an undisturbed one."""
    ends_undisturbed(job)
