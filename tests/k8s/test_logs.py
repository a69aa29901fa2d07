"""Logs of all pods, over a real socket that breaks: no line is lost or repeated."""

import threading
import time

import pytest
from support.api_objects import at, job, pod, replaced, terminated, unscheduled
from support.api_server import Log
from support.waiting import until

from gptddp.k8s.cli.command import note
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.observe import logs, pod_log, watcher


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Short polls and pauses."""
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


def done(index):
    return pod(index, terminated(0, reason="Completed"), phase="Succeeded")


# -- logs -f -----------------------------------------------------------------------------------


class Following:
    """`logs.follow` in a thread, and its output."""

    def __init__(self, cluster, **options):
        self.got, self.error, self.stopped = [], None, threading.Event()
        self.thread = threading.Thread(target=self._run, args=(cluster, options), daemon=True)
        self.thread.start()

    def _run(self, cluster, options):
        try:
            part, write = logs.Part(**options), self.got.append
            logs.follow(cluster, "demo", write, note, part, stopped=self.stopped)
        except BaseException as error:
            self.error = error

    def wait_for(self, count):
        until(lambda: len(self.got) >= count)
        return self.got

    def join(self):
        self.thread.join(20)
        assert not self.thread.is_alive()
        return self.got


@pytest.fixture
def one(api, cluster):
    """A running job of one pod that has written three lines; its log, and its follower."""
    log = api.logs["demo-worker-0"] = Log(lines(3), done=False)
    api.put(job("Created", "Running", replicas=1), pod(0))
    following = Following(cluster)
    following.wait_for(3)
    return log, following


def end(api, log):
    """The job and the log of its pod end."""
    log.done = True
    api.put(job("Created", "Succeeded", replicas=1), done(0))


def test_a_broken_connection_loses_and_repeats_no_line(api, one):
    """The connection of a growing log breaks at many points, inside lines and between them."""
    (log, following), written = one, lines(400)
    log.break_after = [1, 30, 31, 500, 777, 1000, 2048, 40, 3000, 4444, 5000, 100, 6000]
    for n in range(3, 400):
        log.lines.append(written[n])
        if n % 40 == 0:
            log.break_after.append(300)
            following.wait_for(n)
    following.wait_for(400)
    end(api, log)
    assert following.join() == [f"[w0] {text}" for _, text in written]
    assert any("sinceTime" in path for path in api.asked)


def test_a_line_that_is_cut_at_the_end_of_a_stream_is_read_again(api, cluster):
    """An API server that loses the node ends the stream in the middle of a line, without an
    error."""
    log = api.logs["demo-worker-0"] = Log(lines(3), done=True)
    log.end_after = [len(log.text()) - 3]
    api.put(job("Running", replicas=1), pod(0))
    following = Following(cluster)
    following.wait_for(3)
    end(api, log)
    assert following.join() == [f"[w0] {text}" for _, text in lines(3)]


def test_follow_waits_for_pods_and_takes_up_new_ones(api, cluster):
    """There is no pod at first, then one, then its replacement whose clock is behind, then two."""
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


def test_a_restarted_container_loses_no_line(api, one):
    """The last lines of the previous container are read from that container's log."""
    log, following = one
    api.previous["demo-worker-0"] = Log(lines(5))
    after = [(t.replace("09:00", "09:01"), "again") for t, _ in lines(2)]
    api.logs["demo-worker-0"] = Log(after)
    api.put(pod(0, restarts=1))
    log.done = True
    following.wait_for(7)
    end(api, log)
    expected = [text for _, text in lines(5)] + ["again", "again"]
    assert following.join() == [f"[w0] {text}" for text in expected]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"index": 1}, ["1 line 0", "1 line 0", "1 line 1"]),
        ({"tail": 1}, ["[w0] 0 line 1", "[w1] 1 line 1"]),
    ],
)
def test_a_part_of_an_ended_job_is_followed_to_its_end(api, cluster, part, expected):
    """`logs -f` prints one pod without its prefix, or the last lines of each pod."""
    api.put(job("Succeeded", replicas=2), done(0), done(1))
    api.logs |= {f"demo-worker-{n}": Log(lines(3, name=f"{n} ")) for n in range(2)}
    assert sorted(Following(cluster, **part).join()) == expected


def test_follow_survives_an_api_server_that_goes_away(api, one, capsys):
    """It reports the outage and its end once each, and the lines continue."""
    log, following = one
    api.down = True
    log.break_after = [1]
    time.sleep(0.4)
    log.lines += lines(6)[3:]
    api.down = False
    following.wait_for(6)
    end(api, log)
    assert following.join() == [f"[w0] {text}" for _, text in lines(6)]
    said = capsys.readouterr().err
    assert said.count("does not answer") == said.count("answers again") == 1


def test_deleting_a_running_job_ends_logs_follow(api, one):
    """Once job and pods are gone, no more lines can come."""
    log, following = one
    api.remove("PyTorchJob", "demo")
    api.remove("Pod", "demo-worker-0")
    log.done = True
    assert len(following.join()) == 3


def test_another_thread_ends_logs_follow_of_a_running_job(one):
    """No line follows once it has set `stopped`."""
    log, following = one
    following.stopped.set()
    log.lines += lines(6)[3:]
    assert len(following.join()) == 3


def test_an_unreachable_server_at_the_first_poll_is_an_error(api, cluster):
    """It may be the wrong server, and is not contacted again."""
    api.close()
    with pytest.raises(ClusterError, match="cannot reach"):
        logs.follow(cluster, "demo", print, note)


# -- logs --------------------------------------------------------------------------------------


def test_logs_are_merged_in_the_order_of_time(api, k8s):
    """Lines of three pods, interleaved by time; a note names a pod without a log."""
    api.logs = {
        f"demo-worker-{n}": Log(
            [(f"2026-11-21T09:{m // 60:02}:{m % 60:02}.{n}Z", f"{m} {n}") for m in range(3000)]
        )
        for n in range(3)
    }
    api.put(job("Running"), pod(0), pod(1), pod(2), pod(3))
    shown = k8s("logs", "demo")
    assert shown.stdout.splitlines() == [f"[w{n}] {m} {n}" for m in range(3000) for n in range(3)]
    assert "demo-worker-3" in shown.stderr


def test_empty_logs_are_explained(api, k8s):
    """A note has the state, and why the pods wait, instead of no output."""
    api.put(job("Created", replicas=1), unscheduled(0, "0/3 nodes are available: 3 Too full."))
    api.logs["demo-worker-0"] = Log([])
    shown = k8s("logs", "demo")
    assert (shown.exit_code, shown.stdout) == (0, "")
    assert "demo is Pending, and its logs have no line to show: pod demo-wo" in shown.stderr


@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_a_missing_index_is_refused(api, k8s, follow):
    """The message has the existing indices; with -f a pod that may come is waited for."""
    api.put(job("Succeeded", replicas=4), done(0), done(1))
    asked = k8s("logs", "demo", "--pod", "7", *follow)
    assert asked.exit_code == 2 and "its pods are 0, 1" in asked.stderr
    assert k8s("logs", "demo", "--pod", "3", *follow).exit_code == (0 if follow else 2)


PEER, RANK = "gptddp.launch: the worker is lost", "gptddp.launch: rank 1: loss is nan"


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        # the first of two errors; the cause of its peers' end, though they ended before it
        ([(2, "", 40), (2, "", 30)], 1),
        ([(143, PEER, 20), (3, "", 30)], 1),
        ([(2, PEER, 20), (3, RANK, 30)], 1),
        ([(137, "", 30), (143, "", 20)], 1),
    ],
)
@pytest.mark.parametrize("again", [False, True])
def test_the_log_of_the_pod_that_failed_first_is_printed(api, k8s, ends, first, again):
    """Only this log is printed, unprefixed; if the container restarted, the log before that."""
    api.put(job("Created", "Running"))
    for index, (code, message, second) in enumerate(ends):
        ended, runs = terminated(code, message, second=second), {"running": {}}
        api.put(pod(index, runs, last=ended) if again else pod(index, ended))
        said, now = (Log([(at(index), f"{word} of {index}")]) for word in ("words", "now"))
        api.previous[f"demo-worker-{index}"] = said
        api.logs[f"demo-worker-{index}"] = now if again else said
    shown = k8s("logs", "demo", "--first-failure", "--tail", "5")
    assert (shown.exit_code, shown.stdout) == (0, f"words of {first}\n")
    when = at(ends[first][2])
    assert f"pod demo-worker-{first} failed first at {when}: exited with" in shown.stderr


def test_without_a_failure_a_note_says_so(api, k8s):
    """`--first-failure` without a failed pod prints nothing on stdout, and exits with 0."""
    api.put(job("Created", "Running"), pod(0))
    shown = k8s("logs", "demo", "--first-failure")
    assert (shown.exit_code, shown.stdout) == (0, "")
    assert "demo is Running, and no existing pod has failed" in shown.stderr


@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_since_leaves_out_older_lines(api, k8s, follow):
    """`--since` applies to each pod, with and without -f."""
    now = lambda ago: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - ago))  # noqa: E731
    api.put(job("Created", "Succeeded"), done(0), done(1))
    for index in (0, 1):
        said = [(now(7300), f"old {index}"), (now(3000), f"new {index}")]
        api.logs[f"demo-worker-{index}"] = Log(said)
    shown = k8s("logs", "demo", "--since", "1h30m", *follow)
    assert sorted(shown.stdout.splitlines()) == ["[w0] new 0", "[w1] new 1"]
    assert any("sinceSeconds=5400" in path for path in api.asked)
