"""Logs of all pods, against a real socket that breaks: no line lost, none doubled."""

import threading
import time

import pytest
from support.api_objects import job, pod, replaced, terminated, unscheduled
from support.api_server import Log

from gptddp.errors import ClusterError, NotFoundError
from gptddp.k8s.cli.command import note
from gptddp.k8s.observe import logs, pod_log, watcher


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Polls and pauses of hundredths of a second."""
    monkeypatch.setattr(pod_log, "RETRY_S", 0.02)
    monkeypatch.setattr(pod_log, "DRAIN_S", 0.3)
    monkeypatch.setattr(logs, "POLL_S", 0.05)
    monkeypatch.setattr(watcher, "POLL_S", 0.05)


def lines(count, *, name="", per_second=10):
    """Log lines of one pod; some have the same text."""
    return [
        (f"2026-11-21T09:00:{n // per_second:02}.{n:09}Z", f"{name}line {n // 2}")
        for n in range(count)
    ]


class Following:
    """`logs.follow` in a thread, and what it has written."""

    def __init__(self, cluster, **options):
        self.got, self.error = [], None
        self.thread = threading.Thread(target=self._run, args=(cluster, options), daemon=True)
        self.thread.start()

    def _run(self, cluster, options):
        try:
            logs.follow(cluster, "demo", self.got.append, note, logs.Part(**options))
        except BaseException as error:
            self.error = error

    def wait_for(self, count):
        end = time.monotonic() + 20
        while len(self.got) < count and time.monotonic() < end:
            time.sleep(0.01)
        return self.got

    def join(self):
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.got


def done(index):
    return pod(index, terminated(0, reason="Completed"), phase="Succeeded")


def test_a_connection_that_breaks_costs_and_doubles_no_line(api, cluster):
    """Breaks at many points, inside lines and between them, of a log that goes on growing."""
    written = lines(400)
    log = api.logs["demo-worker-0"] = Log(written[:200], done=False)
    log.break_after = [1, 30, 31, 500, 777, 1000, 2048, 40, 3000, 4444, 5000, 100, 6000]
    api.put(job("Created", "Running", replicas=1), pod(0))
    following = Following(cluster)
    following.wait_for(200)
    for n in range(200, 400):
        log.lines.append(written[n])
        if n % 40 == 0:
            log.break_after.append(300)
            following.wait_for(n)
    following.wait_for(400)
    api.put(job("Created", "Succeeded", replicas=1), done(0))
    log.done = True
    assert following.join() == [f"[w0] {text}" for _, text in written]
    assert any("sinceTime" in path for path in api.asked)


def test_a_torn_end_is_not_a_line(api, cluster):
    """An API server that loses the node ends the stream properly, in the middle of a line."""
    written = lines(3)
    log = api.logs["demo-worker-0"] = Log(written, done=True)
    log.end_after = [len(log.text()) - 3]
    api.put(job("Running", replicas=1), pod(0))
    following = Following(cluster)
    following.wait_for(3)
    api.put(job("Succeeded", replicas=1), done(0))
    assert following.join() == [f"[w0] {text}" for _, text in written]


def test_follow_waits_for_pods_and_takes_up_new_ones(api, cluster):
    """No pods at first, then one, then another life of it whose clock is behind, then a second."""
    api.put(job(replicas=2), unscheduled(0, "0/3 nodes are available: 3 Insufficient cpu."))
    following = Following(cluster)
    time.sleep(0.2)
    assert following.thread.is_alive() and following.got == []
    api.logs["demo-worker-0"] = Log(lines(5, name="first "))
    api.put(pod(0))
    following.wait_for(5)
    api.remove("Pod", "demo-worker-0")
    api.logs["demo-worker-0"] = Log(lines(3, name="second "))
    api.put(replaced(pod(0), "another"))
    following.wait_for(8)
    api.logs["demo-worker-1"] = Log(lines(2, name="other "))
    api.put(pod(1))
    following.wait_for(10)
    api.put(job("Failed", replicas=2), replaced(done(0), "another"), done(1))
    expected = [f"[w0] {text}" for _, text in lines(5, name="first ") + lines(3, name="second ")]
    assert following.join() == expected + [f"[w1] {text}" for _, text in lines(2, name="other ")]


def test_a_container_that_restarts_loses_nothing(api, cluster):
    """The end of the container before is read from its own log."""
    log = api.logs["demo-worker-0"] = Log(lines(3), done=False)
    api.put(job("Running", replicas=1), pod(0))
    following = Following(cluster)
    following.wait_for(3)
    api.previous["demo-worker-0"] = Log(lines(5))
    after = [(t.replace("09:00", "09:01"), "again") for t, _ in lines(2)]
    api.logs["demo-worker-0"] = Log(after)
    api.put(pod(0, restarts=1))
    log.done = True
    following.wait_for(7)
    api.put(job("Succeeded", replicas=1), done(0))
    expected = [text for _, text in lines(5)] + ["again", "again"]
    assert following.join() == [f"[w0] {text}" for text in expected]


def test_follow_ends_with_a_job_that_is_over(api, cluster):
    """A finished job's logs are all there, of one pod without the opening."""
    api.put(job("Succeeded", replicas=2), done(0), done(1))
    api.logs |= {f"demo-worker-{n}": Log(lines(3, name=f"{n} ")) for n in range(2)}
    assert Following(cluster, index=1).join() == [text for _, text in lines(3, name="1 ")]


def test_tail_is_of_what_was_there_at_the_start(api, cluster):
    """The last lines of each pod."""
    api.put(job("Succeeded", replicas=2), done(0), done(1))
    api.logs |= {f"demo-worker-{n}": Log(lines(3, name=f"{n} ")) for n in range(2)}
    assert sorted(Following(cluster, tail=1).join()) == ["[w0] 0 line 1", "[w1] 1 line 1"]


def test_follow_survives_an_api_server_that_goes_away(api, cluster, capsys):
    """Told once that it is away and once that it is back, and the lines go on."""
    log = api.logs["demo-worker-0"] = Log(lines(3), done=False)
    api.put(job("Running", replicas=1), pod(0))
    following = Following(cluster)
    following.wait_for(3)
    api.down = True
    log.break_after = [1]
    time.sleep(0.4)
    log.lines += lines(6)[3:]
    api.down = False
    following.wait_for(6)
    api.put(job("Succeeded", replicas=1), done(0))
    log.done = True
    assert following.join() == [f"[w0] {text}" for _, text in lines(6)]
    said = capsys.readouterr().err
    assert said.count("does not answer") == said.count("answers again") == 1


def test_a_reader_that_leaves_ends_the_following(api, cluster):
    """The error of writing comes out of `follow`, so that `| head` ends."""
    api.put(job("Running", replicas=1), pod(0))
    api.logs["demo-worker-0"] = Log(lines(3), done=False)

    def write(text):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        logs.follow(cluster, "demo", write, note)


def test_a_running_job_that_is_deleted_ends_the_following(api, cluster):
    """Job and pods are gone: nothing can come any more."""
    log = api.logs["demo-worker-0"] = Log(lines(3), done=False)
    api.put(job("Running", replicas=1), pod(0))
    following = Following(cluster)
    following.wait_for(3)
    api.remove("PyTorchJob", "demo")
    api.remove("Pod", "demo-worker-0")
    log.done = True
    assert len(following.join()) == 3


def test_an_unknown_job_is_named_with_those_that_are_near(api, cluster):
    """Exit code 102, and what the name may have meant."""
    api.put(job("Running", name="demo-2"))
    with pytest.raises(NotFoundError, match="demo-2") as caught:
        logs.follow(cluster, "demo", print, note)
    assert caught.value.exit_code == 102


def test_logs_are_merged_in_the_order_of_time(api, cluster):
    """Lines of three pods, interleaved as they were written; megabytes pass through."""
    api.logs = {
        f"demo-worker-{n}": Log(
            [(f"2026-11-21T09:{m // 60:02}:{m % 60:02}.{n}Z", f"{m} {n}") for m in range(3000)]
        )
        for n in range(3)
    }
    api.put(pod(0), pod(1), pod(2))
    got = []
    logs.show(cluster, [pod(n) for n in range(3)], got.append, note)
    assert got == [f"[w{n}] {m} {n}" for m in range(3000) for n in range(3)]


def test_a_pod_without_a_log_is_noted(api, cluster, capsys):
    """The others are shown."""
    api.logs["demo-worker-0"] = Log(lines(1))
    api.put(pod(0), pod(1), pod(2))
    api.put(pod(0), pod(1))
    got = []
    logs.show(cluster, [pod(0), pod(1)], got.append, note, prefix=False)
    assert got == ["line 0"]
    assert "demo-worker-1" in capsys.readouterr().err


def test_a_server_that_cannot_be_reached_at_the_first_look_is_an_error(api, cluster):
    """It may be the wrong one, and is not asked again."""
    api.close()
    with pytest.raises(ClusterError, match="cannot reach"):
        logs.follow(cluster, "demo", print, note)


@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_a_pod_that_is_not_there_is_refused_by_its_index(api, k8s, follow):
    """With those that are there; with -f one that may come is waited for."""
    api.put(job("Succeeded", replicas=4), done(0), done(1))
    asked = k8s("logs", "demo", "--pod", "7", *follow)
    assert asked.exit_code == 2 and "the pods that are there are 0, 1" in asked.stderr
    assert k8s("logs", "demo", "--pod", "3", *follow).exit_code == (0 if follow else 2)
