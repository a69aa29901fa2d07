"""One job of four pods on two nodes, hit by faults of pods and nodes.

The tests run in the order of this file on one job, and after each the job has all its pods. The
cost of a fault is the time without a step, beyond what a step takes: once when ranks are lost, and
once when they are back. A table of all costs is printed at the end. Only the processes that a fault
hits may end. One of the last tests compares the run with an undisturbed one.
"""

import os
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict

import pytest
from support.cluster_jobs import PODS, Job
from support.measurements import write_measurement
from support.same_bits import check_same_lines
from support.waiting import until

from gptddp.run.history import history, read_ledger

LONG_S = 300  # several times what the slowest wait takes
QUIET = 8.0  # about the load average of this machine with this job alone
# Limits of the seconds without a step: of one try, and of the median of losses noticed at once.
AT_ONCE, DEAD_S, SILENT_S, TIE_S, MEDIAN_S = 3.0, 9.0, 8.0, 25.0, 1.0
FLAGS = ["--preset=tiny", "--eval-every=100000", "--log-every=10"]
# The bits depend on the threads, and pods have other CPUs than this machine. The learning rate must
# not depend on the number of steps. One process does the steps that are compared in a minute.
FLAGS += ["--threads=1", "--final-lr=1", "--batch=12"]
BITS = 200


@pytest.fixture(scope="module")
def recoveries():
    """The costs of each kind of fault, printed at the end."""
    found = defaultdict(list)
    yield found
    print("\n\nseconds without a step at a loss; of these, the pause; the same at the return;")
    print("until as many trained as were waited for; the load")
    for fault, its in found.items():
        for it, load in its:
            back = "" if it.back_s is None else f"{it.back_s:.2f}"
            costs = f"{it.seconds:6.2f} {it.pause_s:6.2f} {back:>6} {it.whole_s:6.1f} {load:5.0f}"
            print(f"  {fault:46} {costs}")


@pytest.fixture(scope="module")
def job(prepared, recoveries):
    """A long job of four pods with the preset `tiny`; a step takes half a second here.

    Its checkpoints are an hour apart, so after a fault the state comes from survivors.
    """
    it, at = Job(prepared, "drill"), time.time()
    # Two such pods fill a node of two CPUs, beside what its own pods ask for.
    pods = (*PODS, "--cpu=900m", "--replicas=4")
    it.submit(*pods, "--", *FLAGS, "--steps=100000", "--checkpoint-every=3600")
    print(f"submit to the first step: {it.reach(0, timeout_s=LONG_S)['time'] - at:.1f} s")
    it.reach(10)
    yield it
    it.cli("delete", code=None)


@pytest.fixture(scope="module")
def recover(job, recoveries):
    """recover(what, fault, limit_s, **of Job.recover): record what a fault costs. At the loss this
    is at most `limit_s` seconds without a step, if this machine has little else to do."""

    def measure(what, fault, limit_s, **options):
        last = job.last_step()
        until(lambda: job.last_step() > last + 5, "steps", LONG_S)  # so that step_s is known
        found, load = job.recover(fault, **options), os.getloadavg()[0]
        recoveries[what].append((found, load))
        values = {"seconds": found.seconds, "pause_s": found.pause_s, "back_s": found.back_s}
        values["load"] = load
        write_measurement("cluster.jsonl", where="cluster", what=what, redone=0, **values)
        busy = load / QUIET
        most_s = limit_s if busy < 1 else limit_s * busy + 5 * found.step_s
        assert found.seconds < most_s, found
        return found

    return measure


@pytest.fixture(scope="module")
def one_process(prepared, tmp_path_factory):
    """one_process() -> the run directory of a process that does the first steps undisturbed.

    It begins with the fixture, while the job is suspended.
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


def node_without(job: Job, index: int) -> str:
    """The node that does not hold this pod."""
    nodes = {pod["spec"]["nodeName"] for pod in job.pods()} - {job.node_of(index)}
    assert len(nodes) == 1, "four pods of 900m do not fit on fewer than two nodes of two CPUs"
    return nodes.pop()


def on(job: Job, node: str) -> set[str]:
    return {p["metadata"]["name"] for p in job.pods() if p["spec"].get("nodeName") == node}


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


@pytest.mark.parametrize("index", [3, 0])
def test_a_killed_worker_process_costs_a_step(job, recover, index):
    """SIGKILL of a training process: its container continues, and its launcher starts another."""
    before = job.pod(index)["metadata"]["uid"]
    found = recover("worker process killed", lambda: job.kill(index, "worker"), AT_ONCE)
    assert job.pod(index)["metadata"]["uid"] == before
    assert found.lost == {f"{job.name}-worker-{index}"}
    assert found.events[0]["lost"][0]["how"].startswith("its process ")


def test_a_killed_container_costs_a_step(job, recover):
    """SIGKILL of a container's main process: the operator replaces the pod without back-off."""
    before = job.pod(2)["metadata"]["uid"]
    found = recover("container killed", lambda: job.kill(2, "launcher"), AT_ONCE)
    assert job.pod(2)["metadata"]["uid"] != before
    assert found.lost == {f"{job.name}-worker-2"}


@pytest.mark.parametrize("index", [1, 3])
def test_a_pod_deleted_by_force_costs_a_step(job, recover, index):
    """`kubectl delete pod --force`: the operator makes it again at once, while the old one of its
    name still stops."""
    found = recover("pod force-deleted", lambda: job.force_delete(index), AT_ONCE)
    assert found.lost == {f"{job.name}-worker-{index}"}
    assert "another launcher" not in found.events[0]["lost"][0]["how"]


def test_rank_0_is_lost_six_times_in_five_minutes(job, recover):
    """The pod of rank 0 is killed or deleted, six times: another pod gets rank 0 at once.

    `status` shows new steps, and /metrics answers at the new rank 0. The name of a pod that comes
    back resolves to another address, and the others find it there.
    """
    began, hosts, addresses = time.time(), [], set()
    for i in range(6):
        hosts.append(job.rank_0())
        addresses.add(job.pod(hosts[-1])["status"]["podIP"])
        fault = job.force_delete if i % 2 else lambda it: job.kill(it, "launcher")
        recover("pod of rank 0 killed or deleted", lambda it=fault: it(hosts[-1]), AT_ONCE)
        assert job.rank_0() != hosts[-1]
        check_seen(job)
    assert len(set(hosts)) > 2 and len(addresses) == 6
    assert time.time() - began < 300 * max(1.0, os.getloadavg()[0] / QUIET)
    for pod in job.pods():
        (status,) = pod["status"]["containerStatuses"]
        assert status["restartCount"] == 0 and "running" in status["state"]


def check_seen(job: Job) -> None:
    """`status` and /metrics show the steps of the present rank 0."""
    step = job.last_step()
    until(lambda: (seen := job.seen()) and seen["step"] > step, "its step in `status`", 60)
    pod = f"{job.name}-worker-{job.rank_0()}:9464"
    place = f"/api/v1/namespaces/{job.namespace.namespace}/pods/{pod}/proxy/metrics"
    text = until(
        lambda: job.namespace.kubectl("get", "--raw", place, check=False).stdout, "metrics", 60
    )
    assert float(re.search(r"^gptddp_world_size.* (\S+)$", text, re.M)[1]) == 4
    assert float(re.search(r"^gptddp_step(?:\{.*\})? (\S+)$", text, re.M)[1]) > step


def test_a_deleted_pod_leaves_in_good_order(job, recover):
    """`kubectl delete pod` with its grace period: it leaves at the end of a step."""
    pod = f"pod/{job.name}-worker-3"
    delete = ("delete", pod, "--wait=false")
    found = recover("pod deleted", lambda: job.namespace.kubectl(*delete), AT_ONCE)
    assert found.events[0]["lost"][0]["how"] == "told to stop"


@pytest.mark.parametrize("has_rank_0", [False, True])
def test_a_silent_node_does_not_stop_the_job(job, recover, has_rank_0):
    """Half of the ranks freeze with their node: there is no majority, so the run's lease decides.

    The half with the lease continues after the silence; the other waits until the lease expires.
    The frozen ranks join again by themselves, in the same processes except rank 0.
    """
    node = job.node_of(job.rank_0()) if has_rank_0 else node_without(job, job.rank_0())
    whose = "with" if has_rank_0 else "without"
    limit_s = TIE_S if has_rank_0 else SILENT_S
    what = f"node silent, half of the ranks, {whose} rank 0"
    try:
        options = {"world_size": 2, "timeout_s": LONG_S}
        found = recover(what, lambda: pause(node), limit_s, **options)
        assert found.lost == on(job, node)
    finally:
        docker("unpause", node)
    job.settle()


def test_a_dead_node_does_not_stop_the_job(job, recover):
    """The pods of the other node continue; those of the dead node come back with it."""
    node = node_without(job, job.rank_0())
    try:
        options = {"world_size": 2, "timeout_s": LONG_S}
        what = "a node's processes killed, half of the ranks"
        recover(what, lambda: docker("kill", node), DEAD_S, **options)
    finally:
        docker("start", node)
    job.settle()


def test_one_silent_pod_is_dropped_by_the_others(job, recover):
    """Two of three pods are a majority: they drop the silent third without the lease."""
    job.cli("scale", "--replicas=3")
    job.reach(job.last_step(), world_size=3)
    until(lambda: len(job.pods()) == 3, "three pods", 60)
    nodes = [pod["spec"]["nodeName"] for pod in job.pods()]
    node = next(it for it in nodes if nodes.count(it) == 1)
    try:
        options = {"world_size": 2, "timeout_s": LONG_S}
        found = recover("node silent, one of three ranks", lambda: pause(node), SILENT_S, **options)
        assert found.lost == on(job, node)
    finally:
        docker("unpause", node)
    job.settle(3)
    job.cli("scale", "--replicas=4")
    job.reach(job.last_step(), world_size=4, timeout_s=LONG_S)


def test_half_of_all_losses_cost_less_than_a_second(recoveries):
    """The median loss of a worker or pod, if this machine had little else to do."""
    at_once = [what for what in recoveries if what.endswith(("killed", "deleted"))]
    found = [it for what in at_once for it in recoveries[what]]
    assert len(found) > 10
    busy = max(1.0, statistics.median(load for _, load in found) / QUIET)
    assert statistics.median(it.seconds for it, _ in found) < MEDIAN_S * busy


def test_a_drain_takes_one_pod_at_a_time(job):
    """The PodDisruptionBudget lets one pod go; the next has to wait until that one is back."""
    node = node_without(job, 0)
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
    """4 -> 2 -> 4 pods while it trains; more than --max is refused with the reason."""
    job.cli("scale", "--replicas=2")
    job.reach(job.last_step(), world_size=2)
    until(lambda: len(job.pods()) == 2, "two pods", 60)
    job.cli("scale", "--replicas=4")
    job.reach(job.last_step(), world_size=4)
    refused = job.cli("scale", "--replicas=5", code=2)
    assert "--max" in refused.stderr


def test_suspend_keeps_the_run_and_resume_goes_on(job, request):
    """Suspended: no pods, a checkpoint of the last step. Resumed: nothing is done again."""
    job.cli("suspend")
    until(lambda: not job.pods(), "no pods", 90)
    assert job.condition("Suspended")
    last = job.last_step()
    assert list((job.run / "checkpoints").glob(f"step-{last:012}.*"))
    assert job.cli("wait", "--timeout=5", code=103)
    request.getfixturevalue("one_process")()
    job.cli("resume")
    job.reach(last)
    assert all(line["step"] > last for line in list(job.lives().values())[-1])


def test_the_run_equals_an_undisturbed_run(job, one_process):
    """Every step is logged once, with the rows of an undisturbed process. The first two hundred
    steps, and the state after them, are equal bit for bit."""
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
    assert len(job.worlds()) > 25
    check_same_lines(lines[:BITS], list(history(one_process())))
    assert "state_fp" in lines[BITS - 1]


def test_no_fault_cost_more_than_the_step_in_flight(job):
    """Every life began where the previous one had ended."""
    starts = [event for event in read_ledger(job.run) if event["event"] == "start"]
    assert [start["redo"] for start in starts] == [0] * len(starts)
    assert [it["source"] for it in starts if it["source"] != "memory"][:1] == ["scratch"]
    assert sum(it["source"] != "memory" for it in starts) == 2  # and when it was resumed


def test_delete_leaves_nothing_but_the_run(job):
    """No pod, service, companion or job of this name is left; the run directory is."""
    job.cli("delete")
    kinds = "pytorchjobs,pods,services,secrets,serviceaccounts,networkpolicies,pdb,jobs"
    left = job.namespace.kubectl("get", kinds, "-o", "name").stdout.split()
    assert [name for name in left if job.name in name] == []
    assert (job.run / "config.json").exists()
    assert job.cli("status", code=102)
