"""Local jobs that are killed, stopped or continued, and two at once; real processes."""

import os
import signal
import subprocess
import time

import pytest
from support.local_jobs import job, kinds, pod_file, status
from support.manifests import container
from support.processes import alive
from support.waiting import until

from gptddp.k8s.local import locks, reaper

# -- death -------------------------------------------------------------------------------------

FAMILY = """
if once(name):
    clean = {"PATH": os.environ["PATH"]}
    other = subprocess.Popen(["sleep", "300"], start_new_session=True)
    scrubbed = subprocess.Popen(["sleep", "300"], env=clean)
    (runs / f"{name}.pids.tmp").write_text(f"{os.getpid()} {other.pid} {scrubbed.pid}")
    (runs / f"{name}.pids.tmp").rename(runs / f"{name}.pids")
    time.sleep(300)
wait("end")
"""


def family(folder, name):
    return [int(pid) for pid in pod_file(folder, f"{name}.pids").read_text().split()]


def test_all_processes_of_a_killed_pod_end(start, tmp_path):
    """SIGKILL of the main process also ends children in other sessions; another pod replaces it."""
    process = start(job(FAMILY))
    pids = until(lambda: family(tmp_path, "job-worker-1"))
    assert status(tmp_path)["pods"]["job-worker-1"]["pid"] == pids[0]
    os.kill(pids[0], signal.SIGKILL)
    until(lambda: status(tmp_path)["pods"]["job-worker-1"]["pid"] not in (None, pids[0]))
    assert not any(map(alive, pids))
    pod_file(tmp_path, "end").touch()
    assert process.wait(20) == 0


@pytest.mark.parametrize("guarded", [True, False])
def test_a_killed_runner_leaves_no_process_and_the_job_continues(start, finish, tmp_path, guarded):
    """Its reaper ends the pods' processes; without a reaper they end with their parent, or by the
    next submit, which continues the job."""
    built = job(FAMILY)
    process = start(built)
    pids = until(lambda: family(tmp_path, "job-worker-0") + family(tmp_path, "job-worker-1"))
    if not guarded:
        command = ["pgrep", "-P", str(process.pid), "-f", "reaper.py"]
        os.kill(int(subprocess.run(command, capture_output=True, text=True).stdout), signal.SIGKILL)
    process.kill()
    until(lambda: not alive(pids[0]) and not alive(pids[3]))
    pod_file(tmp_path, "end").touch()
    exit_code, _, err = finish(built)  # at once: it has to wait for the reaper of the first
    assert exit_code == 0, err
    if not guarded:  # without tag and reaper nothing finds these
        os.kill(pids[2], signal.SIGKILL), os.kill(pids[5], signal.SIGKILL)
    until(lambda: not any(map(alive, pids)))
    assert reaper.members(str(tmp_path)) == []


# -- stopping and continuing -------------------------------------------------------------------


@pytest.mark.parametrize(("grace_s", "again"), [(300, True), (1, False)])
def test_pods_that_ignore_sigterm_have_their_grace_period(start, tmp_path, grace_s, again):
    """They are killed after the grace period, or at once after a second Ctrl-C."""
    ignores = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = f"{ignores}; (runs / f'{{name}}.up').touch(); wait('never')"
    process = start(job(code, grace_s=grace_s))
    until(lambda: all(pod_file(tmp_path, f"job-worker-{i}.up").exists() for i in range(2)))
    process.send_signal(signal.SIGINT)
    if again:
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130 and ("did not stop within 1 s" in err) is not again
    assert "the same command continues it" in err
    assert reaper.members(str(tmp_path)) == []


def test_submitting_again_is_a_no_op_or_a_refusal(start, finish, tmp_path):
    """A running or succeeded job is reported; another manifest is refused with the difference."""
    built, other = job("wait('end')"), job("wait('end')", replicas=3)
    process = start(built)
    until(lambda: kinds(status(tmp_path)) == ["Created", "Running"])
    exit_code, _, err = finish(built)
    assert exit_code == 0 and f"already running, as process {process.pid}" in err
    exit_code, _, err = finish(other)
    assert exit_code == 2
    assert "spec.elasticPolicy.maxReplicas: 2 -> 3\n" in err and ".Worker.replicas: 2 -> 3\n" in err
    assert "another --name" in err and len(err.splitlines()) == 4
    pod_file(tmp_path, "end").touch()
    assert process.wait(20) == 0
    exit_code, _, err = finish(built)
    assert exit_code == 0 and "already succeeded" in err
    assert finish(other)[0] == 2


def test_a_job_whose_run_is_gone_runs_again(finish, tmp_path):
    """Succeeded counts only while the run directory exists: without it the user wants a new run."""
    built = job("pathlib.Path(sys.argv[2]).mkdir(); print('trained', flush=True)", replicas=1)
    container(built)["args"] = ["--run-dir", "/runs/job"]
    assert "already" not in finish(built)[2]
    assert "already succeeded" in finish(built)[2]
    pod_file(tmp_path, "job").rmdir()
    assert finish(built)[0] == 0
    log = tmp_path / "local" / "jobs" / "job" / "logs" / "job-worker-0.log"
    assert log.read_text() == 2 * "trained\n"


def test_a_network_in_use_is_not_given_to_another_job():
    """Two jobs get different networks, also if both searches begin at the same slot."""
    (one, held), (two, other) = locks.network("key"), locks.network("key")
    with held, other:
        assert one.prefix != two.prefix and one.port != two.port
