"""One job of four pods on two nodes, hit by everything that happens to pods and nodes.

The tests run in the order of this file on one job, and each leaves it whole again. Recovery is the
time from the fault to the next step that is new, done by all four ranks; the table of all of them
is printed at the end. The last test compares what was trained with a run that nobody disturbed.
"""

import statistics
import subprocess
import sys
import time
from collections import defaultdict

import pytest
from support.cluster_jobs import PODS, Job
from support.measurements import recovery, write_measurement
from support.same_bits import check_same_lines
from support.waiting import until

from gptddp.run.history import history, read_ledger

LONG_S = 300  # several times what any of it takes
FLAGS = ["--preset=tiny", "--eval-every=100000", "--log-every=10"]
# The bits depend on the threads, and pods have other CPUs than this machine; the rate is to be that
# of any number of steps. One process does the steps that are compared bit for bit in a minute.
FLAGS += ["--threads=1", "--final-lr=1", "--batch=12"]
BITS = 200
# Runs in a pod: end the launcher (the child of the init process) or the training worker.
KILL = """
import os, pathlib, signal, sys
def stat(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
pids = [int(p.name) for p in pathlib.Path("/proc").glob("[0-9]*") if int(p.name) != os.getpid()]
launcher = next(p for p in pids if p > 1 and int(stat(p)[1]) == 1)
largest = max((p for p in pids if p not in (1, launcher)), key=lambda p: int(stat(p)[21]))
os.kill(launcher if sys.argv[1] == "launcher" else largest, signal.SIGKILL)
"""


@pytest.fixture(scope="module")
def recoveries():
    """Seconds by kind of fault, printed when all is done."""
    found = defaultdict(list)
    yield found
    print("\n\nfault to the next new step of four ranks, seconds")
    for fault, seconds in found.items():
        shown = " ".join(f"{s:.1f}" for s in seconds)
        print(f"  {fault:32} median {statistics.median(seconds):5.1f}   of {shown}")


@pytest.fixture(scope="module")
def job(prepared, recoveries):
    """A long job of four pods: the model `tiny` as it is, a step takes half a second here.

    Its checkpoints are an hour apart: what a fault leaves is in the memory of the survivors.
    """
    it, at = Job(prepared, "drill"), time.time()
    # Two such pods fill a node of two CPUs, beside what its own pods ask for.
    pods = (*PODS, "--cpu=900m", "--replicas=4")
    it.submit(*pods, "--", *FLAGS, "--steps=100000", "--checkpoint-every=3600")
    recoveries["submit to the first step"].append(it.reach(0, timeout_s=LONG_S)["time"] - at)
    it.reach(10)
    yield it
    it.cli("delete", code=None)


@pytest.fixture(scope="module")
def recover(job, recoveries):
    """recover(what, fault, **of Job.recover): the seconds, noted with where they went."""

    def measure(what, fault, **options):
        events = len(read_ledger(job.run))
        seconds = job.recover(fault, **options)
        recoveries[what].append(seconds)
        life = max(job.lives())
        write_measurement(
            "cluster.jsonl",
            where="cluster",
            what=what,
            seconds=seconds,
            redone=sum(event.get("redo", 0) for event in read_ledger(job.run)[events:]),
            recovered=until(lambda: recovery(job.run, life), "the event of the recovery", 30),
        )
        return seconds

    return measure


@pytest.fixture(scope="module")
def one_process(prepared, tmp_path_factory):
    """one_process() -> the run directory of a process that does the first steps undisturbed.

    It begins with the fixture: a silent node leaves the processors idle for a minute.
    """
    folder = tmp_path_factory.mktemp("one-process")
    command = [sys.executable, "-m", "gptddp.train", *FLAGS, f"--steps={BITS}", "--data"]
    command += [str(prepared.shared / "data/corpus"), "--run-dir", str(folder / "run")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)

    def finished():
        assert process.wait(3 * LONG_S) == 0, (folder / "log").read_text()
        return folder / "run"

    yield finished
    process.kill()
    process.wait()


def kill(job: Job, index: int, what: str) -> None:
    # The container ends with its launcher, and now and then before the killer's own exit is
    # reported: 137 then. Whether it was killed is seen in the recovery that must follow.
    python = ("--", "python", "-c", KILL, what)
    done = job.namespace.kubectl("exec", f"{job.name}-worker-{index}", *python, check=False)
    assert done.returncode in (0, 137), done.stderr


def force_delete(job: Job, index: int) -> None:
    pod = f"pod/{job.name}-worker-{index}"
    job.namespace.kubectl("delete", pod, "--force", "--grace-period=0", "--wait=false")


def other_node(job: Job) -> str:
    """The node that does not hold worker-0, which is the host of the rendezvous."""
    nodes = {pod["spec"]["nodeName"] for pod in job.pods()} - {job.node_of(0)}
    assert len(nodes) == 1, "four pods of 900m do not fit on fewer than two nodes of two CPUs"
    return nodes.pop()


def docker(*arguments: str) -> None:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr}"


def pause(node: str) -> None:
    """Freeze a node; the kernel may need a second try where the machine is busy."""
    done = subprocess.run(["docker", "pause", node], capture_output=True, text=True)
    if done.returncode:
        time.sleep(1)
        docker("pause", node)


def test_the_pods_are_spread_over_two_nodes(job):
    """Four pods run, two on each worker node."""
    nodes = [pod["spec"]["nodeName"] for pod in job.pods()]
    assert sorted(nodes.count(node) for node in set(nodes)) == [2, 2]


@pytest.mark.parametrize("index", [3, 1, 0])
def test_a_killed_worker_process_costs_seconds(job, recover, index):
    """SIGKILL of a training process: its container goes on, its agent starts another."""
    before = job.pod(index)["metadata"]["uid"]
    recover("worker process killed", lambda: kill(job, index, "worker"))
    assert job.pod(index)["metadata"]["uid"] == before


@pytest.mark.parametrize("index", [2, 1])
def test_a_killed_container_costs_seconds(job, recover, index):
    """SIGKILL of a container's main process: the operator replaces the pod without back-off."""
    before = job.pod(index)["metadata"]["uid"]
    recover("container killed", lambda: kill(job, index, "launcher"))
    assert job.pod(index)["metadata"]["uid"] != before


@pytest.mark.parametrize("index", [2, 1, 3])
def test_a_pod_deleted_by_force_costs_seconds(job, recover, index):
    """`kubectl delete pod --force`: the operator makes it again at once."""
    recover("pod force-deleted", lambda: force_delete(job, index))


def test_worker_0_may_go_six_times_within_five_minutes(job, recover):
    """The host of the rendezvous is killed and deleted over and over; no back-off grows.

    Its name then resolves to another address, and the others find it there: all four train on.
    """
    seconds, addresses = [], {job.pod(0)["status"]["podIP"]}
    for i in range(6):
        fault = (lambda: force_delete(job, 0)) if i % 2 else (lambda: kill(job, 0, "launcher"))
        seconds.append(recover("worker-0 killed or deleted", fault))
        addresses.add(job.pod(0)["status"]["podIP"])
    assert len(addresses) > 1
    assert sum(seconds) < 300
    assert max(seconds[3:]) < 3 * max(seconds[:3]), "later recoveries take longer: a back-off"
    for pod in job.pods():
        (status,) = pod["status"]["containerStatuses"]
        assert status["restartCount"] == 0 and "running" in status["state"]


def test_a_deleted_pod_leaves_in_good_order(job, recover):
    """`kubectl delete pod` with its grace period: SIGTERM stops the world at a step's end."""
    pod = f"pod/{job.name}-worker-3"
    recover("pod deleted", lambda: job.namespace.kubectl("delete", pod, "--wait=false"))


def test_a_silent_node_does_not_stop_the_job(job, recover, one_process):
    """A paused node's ranks are given up when their collective times out; its return is noticed.

    A silent node that holds worker-0 stops the job until it is back or removed: the store of the
    rendezvous is there, and its pods are not replaced before the API server sees them gone.
    """
    node = other_node(job)
    pause(node)
    try:
        recover("node silent, to two ranks", lambda: None, world_size=2, timeout_s=LONG_S)
    finally:
        docker("unpause", node)
    one_process()  # nor is what it still has to do a load of the tests that follow
    job.reach(job.last_step(), timeout_s=LONG_S)


def test_a_dead_node_does_not_stop_the_job(job, recover):
    """The pods of the other node train on; the dead node's come back with it."""
    node = other_node(job)
    try:
        recover(
            "node dead, to two ranks", lambda: docker("kill", node), world_size=2, timeout_s=LONG_S
        )
    finally:
        docker("start", node)
    job.reach(job.last_step(), timeout_s=LONG_S)
    until(lambda: len(job.pods()) == 4, "four pods", LONG_S)


def test_a_drain_takes_one_pod_at_a_time(job):
    """The PodDisruptionBudget lets one pod go; the next has to wait until that one is back."""
    node = other_node(job)
    before = {pod["metadata"]["uid"] for pod in job.pods()}
    drain = ["drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=15s"]
    try:
        # Its replacement finds no room on the other node, so the second pod must stay.
        refused = job.namespace.kubectl(*drain, check=False)
        assert refused.returncode and "disruption budget" in refused.stderr
        assert len(before & {pod["metadata"]["uid"] for pod in job.pods()}) == 3
        job.reach(job.last_step(), world_size=3)
    finally:
        job.namespace.kubectl("uncordon", node)
    job.reach(job.last_step())


def test_scale_changes_a_live_job(job):
    """4 -> 2 -> 4 pods while it trains; beyond its bounds it is refused with the reason."""
    job.cli("scale", "--replicas=2")
    job.reach(job.last_step(), world_size=2)
    until(lambda: len(job.pods()) == 2, "two pods", 60)
    job.cli("scale", "--replicas=4")
    job.reach(job.last_step(), world_size=4)
    refused = job.cli("scale", "--replicas=5", code=2)
    assert "--max" in refused.stderr


def test_suspend_keeps_the_run_and_resume_goes_on(job):
    """Suspended: no pods, a checkpoint of the last step. Resumed: nothing is done again."""
    job.cli("suspend")
    until(lambda: not job.pods(), "no pods", 90)
    assert job.condition("Suspended")
    last = job.last_step()
    assert list((job.run / "checkpoints").glob(f"step-{last:012}.*"))
    assert job.cli("wait", "--timeout=5", code=103)
    job.cli("resume")
    job.reach(last)
    assert all(line["step"] > last for line in list(job.lives().values())[-1])


def test_the_run_is_the_undisturbed_one(job, one_process):
    """Every step once, and the rows of each are those of one process that nobody disturbs; the
    first two hundred steps, and the state after them, are so bit for bit."""
    code = (
        "import sys\n"
        "from gptddp.config import with_preset\n"
        "from gptddp.flags import from_args\n"
        "from gptddp.data.dataset import open_dataset\n"
        "from gptddp.data.loader import Loader\n"
        "c = with_preset(from_args(sys.argv[2:]), accelerator=False)\n"
        "loader = Loader(open_dataset(c.data), lanes=c.lanes, batch=c.batch, seq_len=c.seq_len,\n"
        "                seed=c.seed)\n"
        "for _ in range(int(sys.argv[1])): print(f'{loader.next().fp:016x}')\n"
        "loader.close()\n"
    )
    job.reach(BITS)
    lines = job.lines()
    command = [sys.executable, "-c", code, str(len(lines)), *FLAGS, "--data"]
    command += [job.namespace.shared / "data/corpus"]
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    assert [line["batch_fp"] for line in lines] == run.stdout.split()
    assert len(job.lives()) > 15
    check_same_lines(lines[:BITS], list(history(one_process())))
    assert "state_fp" in lines[BITS - 1]


def test_no_fault_cost_more_than_the_step_in_flight(job):
    """Every life began where the one before had ended."""
    starts = [event for event in read_ledger(job.run) if event["event"] == "start"]
    assert [start["redo"] for start in starts] == [0] * len(starts)


def test_delete_leaves_nothing_but_the_run(job):
    """No pod, service, companion or job of this name is left; the run directory is."""
    job.cli("delete")
    kinds = "pytorchjobs,pods,services,secrets,serviceaccounts,networkpolicies,pdb,jobs"
    left = job.namespace.kubectl("get", kinds, "-o", "name").stdout.split()
    assert [name for name in left if job.name in name] == []
    assert (job.run / "ledger.jsonl").exists()
    assert job.cli("status", code=102)
