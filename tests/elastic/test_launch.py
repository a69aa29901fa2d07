"""Real launchers with toy workers, each pod at a loopback address, killed at the worst moments."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ledgers
from support.launchers import Job
from support.processes import alive, children
from support.waiting import until


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[Job]:
    job = Job(tmp_path_factory.mktemp("launch") / "job", pods=3, slot=1, fewest=2)
    yield job
    job.close()


@pytest.fixture
def job(running: Job) -> Job:
    """A running job of three pods, which is repaired after the test before."""
    running.whole()
    return running


def survivors(job: Job, workers: dict[int, int]) -> None:
    """Check that these workers, by pod, and their launchers are still the same processes."""
    assert {i: job.worker(i) for i in workers} == workers and all(map(alive, workers.values()))
    assert [i for i in workers if job.pods[i].poll() is not None] == []


def workers_but(job: Job, lost: int) -> dict[int, int]:
    return {i: job.worker(i) for i in job.pods if i != lost}


def test_sigterm_does_not_end_the_fork_server_of_a_pod(job):
    """Slurm signals every process: the fork server must survive, or its workers would die."""
    (pod, worker), before = (job.pods[1].pid, job.worker(1)), job.log(1)
    (server,) = [child for child in children(pod) if worker in children(child)]
    os.kill(server, signal.SIGTERM)
    job.goes_on(3)
    assert alive(server) and job.worker(1) == worker and job.log(1) == before


def killed(job: Job) -> None:
    os.kill(job.worker(1), signal.SIGKILL)


def raises(job: Job) -> None:
    """An exception is printed with its traceback, once."""
    seen = job.log(1).count("RuntimeError: the toy was told to raise")
    job.order(1, "raise")
    until(lambda: job.log(1).count("RuntimeError: the toy was told to raise") == seen + 1)


def crashes(job: Job) -> None:
    """The launcher counts the crash, because the worker cannot."""
    job.order(1, "crash")
    until(lambda: "its process died of SIGSEGV" in job.log(1), "the crash")
    (fault,) = (job.folder / "faults").iterdir()
    assert (
        "its process died of SIGSEGV" in fault.read_text() and '"pod": "pod-1"' in fault.read_text()
    )


def without_server(job: Job) -> None:
    """The process that forks the workers is killed, and the pod makes a new one."""
    old = job.worker(1)
    server = int(Path(f"/proc/{old}/stat").read_text().rpartition(")")[2].split()[1])
    assert server != job.pods[1].pid
    os.kill(server, signal.SIGKILL)
    until(lambda: not alive(old), "the old worker's end", timeout_s=5)


@pytest.mark.parametrize(
    ("harm", "how"),
    [
        (killed, "its process died of SIGKILL); it is started again at once"),
        (raises, "its process ended with exit code 1); it is started again in 0.5 s"),
        (crashes, "its process died of SIGSEGV); it is started again in 1 s"),
        (
            without_server,
            "it died with the server that it was forked from); it is started again in",
        ),
    ],
)
def test_a_lost_worker_is_replaced(job, harm, how):
    """A killed worker is replaced at once, and its launcher logs how it ended; the others' workers
    are the same processes."""
    old, others = job.worker(1), workers_but(job, 1)
    harm(job)
    until(lambda: job.worker(1) != old, "a new worker")
    job.goes_on(3)
    survivors(job, others)
    assert f"gptddp.launch: the worker is lost ({how}" in job.log(1)


def test_no_semaphore_of_a_killed_pod_remains(job):
    """Neither the worker nor its launcher has a semaphore at any time."""
    for pid in (job.worker(1), job.pods[1].pid):
        assert "/dev/shm/sem." not in Path(f"/proc/{pid}/maps").read_text()


def sockets(pid: int) -> set[str]:
    links = [os.readlink(it) for it in Path(f"/proc/{pid}/fd").iterdir()]
    return {it for it in links if it.startswith("socket:")}


def test_no_process_of_a_pod_holds_a_connection_of_its_launcher(job):
    """Such a connection would outlive a killed launcher, and hide its death from the others."""
    launcher, worker = job.pods[1].pid, job.worker(1)
    assert len(sockets(launcher)) > 3
    for pid in (worker, *children(launcher)):
        assert not sockets(pid) & sockets(launcher)


@pytest.mark.parametrize("which", [2, 0, 0], ids=["pod", "endpoint", "endpoint again"])
def test_a_killed_launcher_ends_its_worker_and_can_be_replaced(job, which):
    """No process of a pod outlives SIGKILL of its launcher, and a new launcher replaces it; the
    others' workers survive, also if it was the launcher at the endpoint."""
    worker, others = job.worker(which), workers_but(job, which)
    job.pods[which].kill()
    job.pods[which].wait()
    until(lambda: not alive(worker), "the orphan's end", timeout_s=5)
    job.goes_on(2)
    job.start(which)
    until(lambda: job.worker(which) != worker, "a new worker")
    job.goes_on(3)
    survivors(job, others)


def test_sigterm_stops_one_pod_and_the_others_continue_without_it(job):
    """The stopped pod ends with 143, not 0; two workers continue, and three after its return."""
    worker, others = job.worker(2), workers_but(job, 2)
    job.pods[2].terminate()
    assert job.exit_code(2) == 143
    assert not alive(worker)
    job.goes_on(2)
    survivors(job, others)


def test_a_final_error_ends_its_pod_with_its_code_and_message(job):
    """The trainer's exit code 2 is the container's, and its message the last line."""
    others = workers_but(job, 1)
    job.order(1, "final")
    assert job.exit_code(1) == 2
    last = job.log(1).splitlines()[-1]
    assert last == "gptddp.launch: rank 0: the toy was told that its data is bad"
    assert job.log(1).count("its data is bad") == 1
    job.goes_on(2)
    survivors(job, others)


def test_a_final_error_after_sigterm_is_not_lost(job):
    """An error of a worker while its pod stops is reported, and the pod ends with 2."""
    others = workers_but(job, 2)
    job.order(2, "spoil")
    job.pods[2].terminate()
    assert job.exit_code(2) == 2
    assert job.log(2).count("the toy found bad data at its end") == 1
    job.goes_on(2)
    survivors(job, others)


def test_the_end_does_not_wait_for_a_lost_pod(job):
    """If a launcher dies after the last step, its peers and its successor end with 0."""
    job.order(2, "vanish")
    (job.folder / "end").touch()
    assert job.exit_code(2) == -signal.SIGKILL
    assert [job.exit_code(i) for i in (0, 1)] == [0, 0]
    job.start(2)
    assert job.exit_code(2) == 0


def waiting_alone(folder: Path, slot: int) -> Job:
    """A pod that waits for pods that never start."""
    job = Job(folder, pods=2, slot=slot, fewest=2)
    job.start(slot % 2)
    return job


@pytest.mark.parametrize(("slot", "number"), [(3, signal.SIGTERM), (4, signal.SIGINT)])
def test_a_waiting_pod_ends_by_a_signal_or_with_the_run(tmp_path, slot, number):
    """A signal ends a waiting pod with 128 + its number, and the end of the run ends it with 0."""
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


class TwoWorkers(Job):
    def operator_env(self, i: int) -> dict[str, str]:
        return super().operator_env(i) | {"PET_NPROC_PER_NODE": "2"}

    def workers(self, i: int) -> list[int]:
        files = [self.folder / f"pod-{i}{name}.pid" for name in ("", "-1")]
        until(lambda: all(it.exists() and it.read_text() for it in files), "both workers")
        return [int(it.read_text()) for it in files]


@pytest.fixture
def doubled(tmp_path):
    job = TwoWorkers(tmp_path / "job", pods=2, slot=8, fewest=1)
    job.start(0, 1)
    job.goes_on(4)
    yield job
    job.close()


def test_a_worker_of_two_in_a_pod_is_replaced_alone(doubled):
    """A killed worker's sibling stays the same process; each worker has its own launcher."""
    (killed, sibling), others = doubled.workers(0), doubled.workers(1)
    os.kill(killed, signal.SIGKILL)
    until(lambda: doubled.workers(0)[0] != killed, "a new worker")
    doubled.goes_on(4)
    assert doubled.workers(0)[1] == sibling and doubled.workers(1) == others
    assert len(children(doubled.pods[0].pid)) == 2


def test_a_pod_with_two_workers_ends_as_its_launchers_do(doubled):
    """A stopped pod ends with 143; if one worker has an error, the other gets time to stop, and the
    pod ends with the error's code; with a killed pod both workers die."""
    doubled.pods[1].terminate()
    assert doubled.exit_code(1) == 143
    doubled.goes_on(2)
    doubled.start(1)
    doubled.goes_on(4)
    doubled.order(1, "final")
    assert doubled.exit_code(1) == 2
    assert doubled.log(1).count("its data is bad") == 1
    doubled.goes_on(2)
    workers = doubled.workers(0)
    doubled.pods[0].kill()
    until(lambda: not any(map(alive, workers)), "the orphans' end", timeout_s=5)
