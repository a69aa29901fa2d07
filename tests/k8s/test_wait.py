"""Waiting for a job: exit codes, and notes during the wait."""

import threading
import time
from types import SimpleNamespace

import pytest
from support.api_objects import JOB_UID, condition, job, pod, terminated, unscheduled
from support.api_server import Log
from support.cause_cases import made_again

from gptddp.k8s.cli.command import note
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.observe import facts, job_causes, wait, watcher

NO_ROOM = "0/3 nodes are available: 3 Insufficient cpu."


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short poll intervals."""
    monkeypatch.setattr(wait, "POLL_S", 0.03)
    monkeypatch.setattr(watcher, "POLL_S", 0.03)


def later(api, *acts):
    """Run these functions one after the other, each after another poll of the job."""

    def looks():
        return sum("/pytorchjobs/demo" in path for path in api.asked)

    def run():
        for act in acts:
            enough = looks() + 2  # the first poll has ended when the second begins
            while looks() < enough:
                time.sleep(0.01)
            act()

    threading.Thread(target=run, daemon=True).start()


def test_a_succeeded_job_gives_exit_code_0(api, cluster, capsys):
    """Each state is reported once, with the number of ready pods."""
    api.put(job("Created", replicas=2))
    later(
        api,
        lambda: api.put(pod(0), job("Created", "Running", replicas=2)),
        lambda: api.put(job("Created", condition("Running", "False"), "Succeeded", replicas=2)),
    )
    assert wait.until_done(cluster, "demo", note, 20) == 0
    said = [x for x in capsys.readouterr().err.splitlines() if "created yet" not in x]
    assert said == [
        "demo: Pending, 0 of 2 pods ready",
        "demo: Running, 1 of 2 pods ready",
        "demo: Succeeded",
    ]


BROKEN = terminated(2, "gptddp.launch: rank 1: the dataset is broken\n")
WHY = "demo: Failed: pod demo-worker-1: exited with 2 (bad configuration or data): rank 1: the"


@pytest.mark.parametrize(
    ("made", "code", "said", "lines"),
    [
        ([job("Failed"), pod(1, BROKEN, phase="Failed")], 100, WHY, 1),
        ([job("Suspended", suspend=True)], 103, "gptddp-k8s resume demo", 1),
        # a resumed job has Suspended True until the operator has started the pods
        ([job("Suspended", replicas=1), pod(0)], 124, "still Pending after 0.3 s", 2),
        ([job(), unscheduled(0, NO_ROOM)], 124, "0.3 s: pod demo-worker-0: no node takes it", 3),
    ],
)
def test_the_exit_code_says_how_a_wait_has_ended(api, cluster, capsys, made, code, said, lines):
    """100 failed, 103 suspended, 124 timed out; the reason is reported once, before the end."""
    api.put(*made)
    assert wait.until_done(cluster, "demo", note, 0.3) == code
    told = capsys.readouterr().err
    assert said in told and len(told.splitlines()) == lines


@pytest.mark.parametrize("then", [lambda api: api.remove("PyTorchJob", "demo"),
                                  lambda api: api.put(job("Running", uid="another"))])  # fmt: skip
def test_a_deleted_job_gives_exit_code_102(api, cluster, capsys, then):
    """A job that is deleted, or replaced by another of its name, ends the wait with 102."""
    api.put(job("Running"))
    later(api, lambda: then(api))
    assert wait.until_done(cluster, "demo", note, 20) == 102
    assert "demo: gone" in capsys.readouterr().err


HELD = unscheduled(3, NO_ROOM)
PASSING = [
    facts.Facts(job("Running"), [pod(0), pod(1), pod(2), *pods])
    for pods in ([], [HELD], [], [HELD], [HELD], [HELD])
]


@pytest.mark.parametrize(
    ("looks", "words"),
    [(PASSING, "no node takes it"), ([made_again(count) for count in (5, 6, 7)], "never started")],
)
def test_a_reason_is_reported_once_and_only_if_it_lasts(capsys, looks, words):
    """A reason in only one poll is being fixed already; a reason whose seconds and counts grow is
    the same reason."""
    changes = wait.Changes("demo", note)
    for look in looks:
        changes.tell(look)
    assert capsys.readouterr().err.count(words) == 1


def test_a_running_job_without_a_step_is_reported(api, cluster, capsys, monkeypatch):
    """The log is read while the job runs; a note says that no step was logged."""
    monkeypatch.setattr(job_causes, "NO_STEP_S", 0.0)
    api.put(job("Running", replicas=1), pod(0))
    api.logs["demo-worker-0"] = Log([("2026-11-21T09:00:02.000000Z", "waiting for pods: 1")])
    assert wait.until_done(cluster, "demo", note, 0.5) == 124
    assert "not one step was logged" in capsys.readouterr().err


@pytest.mark.parametrize("first", [True, False])
def test_wait_survives_an_outage_of_the_api_server(api, cluster, capsys, first):
    """Errors of the API server, also at the first poll, do not end the wait; start and end of the
    outage are reported once."""
    api.put(job("Running", replicas=1), pod(0))
    down = [] if first else [lambda: setattr(api, "down", True)]
    api.down = first
    later(api, *down, lambda: api.put(job("Succeeded")), lambda: setattr(api, "down", False))
    assert wait.until_done(cluster, "demo", note, 20) == 0
    said = capsys.readouterr().err
    assert said.count("does not answer") == said.count("answers again") == 1


def test_a_single_failure_is_not_reported():
    """One failed request gives no note, as a stale connection may be the cause."""
    answers, said = [1, ClusterError("gone"), 2], []

    def ask():
        if isinstance(it := answers.pop(0), Exception):
            raise it
        return it

    watched = watcher.Watcher(ask, said.append)
    assert [watched.poll(), watched.poll(), said] == [1, 2, []]


def test_the_timeout_holds_while_the_api_server_is_away(api, cluster):
    """During an outage the wait ends at its timeout, with exit code 124."""
    api.put(job("Running", replicas=1), pod(0))
    api.down = True
    assert wait.until_done(cluster, "demo", note, 0.3) == 124


def runs(api, monkeypatch, kind, *log, code=0):
    """A created job runs, and has this state at the next poll; its pod has this log."""

    def controller(body):
        body["metadata"]["uid"] = JOB_UID
        body["status"] = job("Created", "Running")["status"]
        api.put(pod(0))

    def sleep(seconds, slept=time.sleep):
        api.objects["pytorchjobs", "demo"]["status"] = job("Created", kind)["status"]
        if kind != "Running":
            words = terminated(code, "gptddp.launch: rank 0: no such data")
            api.put(pod(0, words, phase="Failed" if code else "Succeeded"))
        slept(seconds)

    api.created["PyTorchJob"] = controller
    monkeypatch.setattr(wait, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    api.logs["demo-worker-0"] = Log([("2026-11-21T09:00:02.000000Z", line) for line in log])


@pytest.mark.parametrize(
    ("kind", "code", "words"),
    [
        ("Succeeded", 0, "demo: Succeeded"),
        ("Failed", 100, "rank 0: no such data"),
        ("Running", 124, "0.5"),
    ],
)
def test_submit_waits_with_the_exit_code_of_the_job(api, k8s, monkeypatch, kind, code, words):
    """It exits with 0 and 100 like `wait`, and 124 at the timeout; the result is on stderr."""
    runs(api, monkeypatch, kind, code=code)
    done = k8s("submit", "--name", "demo", "--wait", "--timeout", "0.5" if code > 100 else "60")
    assert done.exit_code == code and words in done.stderr, done.stderr
    assert done.stdout == "pytorchjob.kubeflow.org/demo created\n"


def test_submit_follows_with_the_logs_on_stdout(api, k8s, monkeypatch):
    """`submit --follow` prints the logs of all pods, to their last line."""
    runs(api, monkeypatch, "Succeeded", "step 1/2", "step 2/2")
    done = k8s("submit", "--name", "demo", "--follow")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["[w0] step 1/2", "[w0] step 2/2"], done.stderr


@pytest.mark.parametrize("flag", ["--wait", "--follow"])
def test_an_interrupted_wait_says_that_the_job_continues(api, k8s, monkeypatch, flag):
    """Ctrl-C ends the wait with 130, and prints the command that deletes the job."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(wait, "until_done", interrupted)
    done = k8s("submit", "--name", "demo", flag)
    assert done.exit_code == 130 and ("pytorchjobs", "demo") in api.objects
    assert f"job continues; `gptddp-k8s delete demo --kubeconfig {api.kubeconfig}" in done.stderr
