"""The launcher on real agents, one a loopback address, that are killed at the worst places."""

import json
import os
import pickle
import signal
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ledgers
from support.launchers import PORT, Job
from support.processes import alive, children
from support.waiting import until
from torch.distributed import TCPStore


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Job]:
    job = Job(tmp_path_factory.mktemp("launch") / "job", pods=3, slot=1, fewest=2)
    yield job
    job.close()


@pytest.fixture
def job(running: Job) -> Job:
    """A job of three pods that is under way, whatever the test before has done to it."""
    running.whole()
    return running


def survivors(job: Job, *killed: int) -> None:
    """The launchers of all other pods are the processes that they were."""
    assert [i for i, pod in job.pods.items() if pod.poll() is not None and i not in killed] == []


def test_a_signal_to_every_process_of_a_pod_leaves_the_worker_its_time(job):
    """As Slurm sends it: the server, whose end is the workers', outlives it; the worker stops."""
    (pod, worker), before = (job.pods[1].pid, job.worker(1)), job.log(1)
    (server,) = [child for child in children(pod) if worker in children(child)]
    os.kill(server, signal.SIGTERM)
    job.goes_on(3)
    assert alive(server) and job.worker(1) == worker and job.log(1) == before
    survivors(job)


def killed(job: Job) -> None:
    os.kill(job.worker(1), signal.SIGKILL)


def raises(job: Job) -> None:
    """An exception is printed with its rank, once."""
    job.order(1, "raise")
    until(lambda: "[rank 1] Traceback" in job.log(1), "the traceback")
    assert job.log(1).count("RuntimeError: the toy was told to raise") == 1


def without_server(job: Job) -> None:
    """Without the process that forks the workers, the pod makes a new one."""
    old = job.worker(1)
    server = int(Path(f"/proc/{old}/stat").read_text().rpartition(")")[2].split()[1])
    assert server != job.pods[1].pid
    os.kill(server, signal.SIGKILL)
    until(lambda: not alive(old), "the old worker's end", timeout_s=5)


def hangs(job: Job) -> None:
    """It never notices that another was killed: its agent ends it."""
    hung, other = job.worker(1), job.worker(2)
    job.order(1, "hang")
    until(lambda: not (job.folder / "pod-1.hang").exists(), "the order's taking")
    os.kill(other, signal.SIGKILL)
    until(lambda: not alive(hung), "the hung worker's end", timeout_s=20)  # torch: 30


@pytest.mark.parametrize("harm", [killed, raises, without_server, hangs])
def test_a_worker_that_is_lost_is_replaced(job, harm):
    """After it all three step on, and no launcher has ended."""
    old = job.worker(1)
    harm(job)
    until(lambda: job.worker(1) != old, "a new worker")
    job.goes_on(3)
    survivors(job)


@pytest.mark.parametrize("which", [2, 0, 0], ids=["pod", "host", "host again"])
def test_a_killed_launcher_takes_its_worker_along_and_can_come_back(job, which):
    """Nothing of a pod outlives SIGKILL of its launcher, and a new one takes its place; the others
    join again in the same processes, also where it was the host of the rendezvous."""
    worker = job.worker(which)
    job.pods[which].kill()
    job.pods[which].wait()
    until(lambda: not alive(worker), "the orphan's end", timeout_s=5)
    job.start(which)
    until(lambda: job.worker(which) != worker, "a new worker")
    job.goes_on(3)
    survivors(job)
    assert which or "the group is lost" in job.log(1)


def test_what_a_stranger_writes_into_the_store_is_not_run_and_ends_nothing(job, tmp_path):
    """Over the state, and where the next world looks for its rank 0: all three step on."""
    store = TCPStore(f"{job.prefix}.100", PORT, is_master=False)
    key, bomb = f"torch.rendezvous.job-{job.slot}", pickle.dumps(Touch(tmp_path / "executed"))
    for value in (bomb, b64encode(bomb), b"\xff\x00", b"unsigned {}", b""):
        state, old = json.loads(store.get(key).partition(b" ")[2]), job.worker(1)
        store.set(f"{key}.{state['round'] + 1}/MASTER_ADDR", "192.0.2.1")
        store.set(key, value)
        os.kill(old, signal.SIGKILL)
        until(lambda old=old: job.worker(1) != old, "a new worker")
        job.goes_on(3)
    survivors(job)
    assert not (tmp_path / "executed").exists()
    assert any("docs/security.md" in job.log(i) for i in range(3))


class Touch:
    """Unpickled, it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_sigterm_stops_one_pod_and_the_others_go_on_without_it(job):
    """The stopped pod ends with 143, not 0; two workers step on, and three when it is back."""
    worker = job.worker(2)
    job.pods[2].terminate()
    assert job.exit_code(2) == 143
    assert not alive(worker)
    job.goes_on(2)
    survivors(job, 2)


def test_a_final_error_ends_its_pod_with_its_code_and_message(job):
    """The trainer's exit code 2 is the container's, and its message the last line."""
    job.order(1, "final")
    assert job.exit_code(1) == 2
    assert job.log(1).splitlines()[-1] == (
        "gptddp.launch: rank 1: the toy was told that its data is bad"
    )
    assert job.log(1).count("its data is bad") == 1
    job.goes_on(2)
    survivors(job, 1)


def test_a_final_error_after_sigterm_is_not_lost(job):
    """A worker that meets one while its pod is being stopped is heard, and the pod ends with 2."""
    job.order(2, "spoil")
    job.pods[2].terminate()
    assert job.exit_code(2) == 2
    assert job.log(2).count("the toy found bad data at its end") == 1
    job.goes_on(2)
    survivors(job, 2)


def test_the_end_does_not_wait_for_a_pod_that_is_gone(job):
    """One launcher dies after the last step: its peers end with 0, and so does its successor."""
    job.order(2, "vanish")
    (job.folder / "end").touch()
    assert job.exit_code(2) == -signal.SIGKILL
    assert [job.exit_code(i) for i in (0, 1)] == [0, 0]
    job.start(2)
    assert job.exit_code(2) == 0
    numbers = [line["step"] for line in job.steps()]
    assert set(numbers) == set(range(1, max(numbers) + 1))
    assert "the group is lost" not in job.log(0)


def waiting_alone(folder: Path, slot: int) -> Job:
    """A pod that waits for others which never come."""
    job = Job(folder, pods=2, slot=slot, fewest=2)
    job.start(slot % 2)  # slot 4 hosts the rendezvous; slot 3 looks for a host that is not there
    return job


@pytest.mark.parametrize(("slot", "number"), [(3, signal.SIGTERM), (4, signal.SIGINT)])
def test_a_pod_that_waits_can_be_stopped_and_sees_the_end(tmp_path, slot, number):
    """In the rendezvous a signal ends a pod with 128 + its number, the run's end another with 0."""
    stopped = waiting_alone(tmp_path / "stopped", slot)
    ended = waiting_alone(tmp_path / "ended", slot + 2)
    try:
        for job in (stopped, ended):
            pid = job.pods[slot % 2].pid
            # the resource tracker and the warm server
            until(lambda pid=pid: len(children(pid)) > 1, "both")
        time.sleep(1.0)
        stopped.pods[slot % 2].send_signal(number)
        stop = {"event": "stop", "step": 1000000, "cause": "steps"}
        ledgers.begun(ended.folder, {"steps": 1000000}, stop)
        assert stopped.pods[slot % 2].wait(20) == 128 + number
        assert ended.pods[slot % 2].wait(20) == 0
    finally:
        stopped.close()
        ended.close()
