"""Pods in network namespaces of their own, on a bridge: cut off, slow, lossy, without names."""

import contextlib
import subprocess
import sys
import time

import pytest
from support.faulty_jobs import SHORT, check_same_run, long
from support.namespaces import NAME, PREFIX, bridge, enter, inside, sh
from support.paths import SUPPORT

from gptddp.k8s.local.container import Network

STEPS = (
    "--steps",
    "400" if SHORT else "2000",
    "--eval-every",
    "5000",
    "--checkpoint-every",
    "3600",
)


@pytest.fixture(scope="module")
def network():
    """A bridge and four namespaces with an address each."""
    with bridge(4):
        yield Network(PREFIX, 23000)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """What the pods have as /etc/hosts: the name of the rendezvous' host."""
    path = tmp_path_factory.mktemp("dns") / "hosts"
    path.write_text(HOSTS)
    return path


HOSTS = f"127.0.0.1 localhost\n{PREFIX}.100 gptddp-worker-0\n"


@pytest.fixture(scope="module")
def job(jobs, network, hosts):
    """Four pods in their namespaces, which find the rendezvous by its name."""

    it = jobs(
        *STEPS,
        network=network,
        within=lambda i: enter(i, hosts),
        GLOO_SOCKET_IFNAME="eth0",
        PET_RDZV_ENDPOINT=f"gptddp-worker-0:{network.port}",
    )
    it.steady()
    return it


def link(i: int, state: str) -> None:
    sh(f"ip -n {NAME} link set pod{i} {state}")


@pytest.mark.fault(15)
@pytest.mark.parametrize("seconds", [5, pytest.param(100, marks=long)])
@pytest.mark.parametrize("which", [2, pytest.param(0, marks=long)], ids=["pod", "host"])
def test_a_link_that_is_down_for_a_while(job, measured, strike, which, seconds):
    """A short cut is waited for or costs one life; after a long one the pod joins again."""
    job.steady()
    name = "the rendezvous' host" if which == 0 else "a pod"
    down, out = time.monotonic(), "its peers' collective times out (60 s)"
    if seconds > 60 and which:
        with strike(job, f"the link of {name} is down", out, 3):
            link(which, "down")
    link(which, "down")
    job.wait(max(0, down + seconds - time.monotonic()))
    with job.fault(new_life=False) as fault:
        link(which, "up")
    measured(f"the link of {name} is up again after {seconds} s", fault, "counted from then on")
    assert fault.redone == 0


@pytest.mark.fault(17)
@long
def test_a_pod_that_hears_and_is_not_heard(job, strike):
    """An asymmetric partition is one world less that pod, and no deadlock."""
    out = "its peers' collective times out"
    with strike(job, "a pod hears the others and is not heard", out, 3):
        inside(2, f"iptables -A OUTPUT -d {PREFIX}.0/24 -j DROP")
    with strike(job, "it is heard again", "it joins again", before=3):
        inside(2, "iptables -F OUTPUT")


@pytest.mark.fault(17)
@long
def test_two_pods_that_do_not_hear_each_other(job, measured):
    """Both see the rendezvous: the world goes on when the network does, with one view."""
    job.steady()
    inside(2, f"iptables -A OUTPUT -d {PREFIX}.103 -j DROP")
    job.wait(75)
    with job.fault() as fault:
        inside(2, "iptables -F OUTPUT")
    measured("two pods do not hear each other for 75 s", fault, "counted from the healing")
    assert fault.redone == 0


LOSS = "iptables -A INPUT -m statistic --mode random --probability {} -j DROP"
TROUBLES = [
    ("1 % of the packets lost", LOSS.format(0.01), "iptables -F INPUT"),
    ("20 % of the packets lost", LOSS.format(0.2), "iptables -F INPUT"),
    (
        "1 Mbit/s",
        "tc qdisc add dev eth0 root tbf rate 1mbit burst 8k latency 200ms",
        "tc qdisc del dev eth0 root",
    ),
]


@pytest.mark.fault(16)
@pytest.mark.parametrize(("trouble", "on", "off"), TROUBLES, ids=["loss-1", "loss-20", "slow"])
def test_a_bad_line_is_slow_and_nobody_is_evicted(job, measured, trouble, on, off):
    """Steps take longer; no life ends."""
    job.steady()
    with job.fault(new_life=False) as fault:
        inside(3, on)
        before = time.monotonic()
        job.steady(steps=8)
        step_s = (time.monotonic() - before) / 8
        inside(3, off)
        job.began = time.time()
    measured(f"{trouble} at one pod", fault, f"steps of {step_s:.1f} s; counted from the healing")
    assert fault.lives == 0


@contextlib.contextmanager
def far_away(i: int, seconds: float):
    """Each frame between a pod and the bridge is so late, in both directions."""
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
def test_a_pod_that_is_far_away_is_slow_and_not_evicted(job, measured):
    """Steps take longer while its frames are 200 ms late each way, and then no more."""

    def step_s(steps: int) -> float:
        before = time.monotonic()
        job.steady(steps=steps)
        return (time.monotonic() - before) / steps

    job.steady()
    with job.fault(new_life=False) as fault:
        with far_away(3, 0.2):
            far_s = step_s(8)
        job.began = time.time()
    near_s = step_s(8)
    measured(
        "each frame 200 ms late, to and from one pod",
        fault,
        f"steps of {far_s:.1f} s, then of {near_s:.1f} s again; counted from the healing",
    )
    assert fault.lives == 0
    assert far_s > 0.2  # a step needs all ranks' gradients, and these are so late
    assert near_s < far_s


@pytest.mark.fault(33)
def test_names_that_do_not_resolve_for_a_while(job, hosts, measured):
    """A pod that comes back when the name of the rendezvous is unknown waits for it."""
    job.steady()
    seconds = 5 if SHORT else 30
    hosts.write_text("127.0.0.1 localhost\n")
    job.kill(2)
    job.wait(seconds)
    with job.fault() as fault:
        hosts.write_text(HOSTS)
    measured(f"the rendezvous' name is unknown for {seconds} s", fault, "tried again until known")
    assert fault.redone == 0


def test_the_run_is_the_undisturbed_one(job, undisturbed):
    """After all of the above."""
    job.finish()
    check_same_run(job, undisturbed(1, *STEPS))
