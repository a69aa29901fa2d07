"""`logs --first-failure` and `logs --since`."""

import time

import pytest
from click.testing import CliRunner
from support import api_objects as objects
from support.api_server import FakeAPI, Log

from gptddp.k8s.cli.main import cli

PEER = "gptddp.launch: the group is lost"


@pytest.fixture
def api(tmp_path):
    server = FakeAPI(tmp_path)
    server.put(objects.job("Created", "Running"))
    yield server
    server.close()


def logs(api, *args):
    return CliRunner().invoke(cli, ["logs", "--kubeconfig", str(api.kubeconfig), "demo", *args])


def put(api, index, text, state, last=None):
    """A pod whose container has written this; with `last` before its restart."""
    api.put(objects.pod(index, state, last=last))
    log = Log([(objects.at(index), text)])
    (api.previous if last else api.logs)[f"demo-worker-{index}"] = log


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        # the first of two errors; what took its peers along, though they ended before
        ([(2, "", 40), (2, "", 30)], 1),
        ([(143, PEER, 20), (3, "", 30)], 1),
        ([(2, PEER, 20), (3, "gptddp.launch: rank 1: loss is nan", 30)], 1),
        ([(137, "", 30), (143, "", 20)], 1),
    ],
)
def test_the_log_of_the_pod_that_failed_first_is_printed(api, ends, first):
    """Alone, without its prefix; how it ended is said on stderr."""
    for index, (code, message, second) in enumerate(ends):
        put(api, index, f"words of {index}", objects.terminated(code, message, second=second))
    done = logs(api, "--first-failure")
    assert (done.exit_code, done.stdout) == (0, f"words of {first}\n")
    at = objects.at(ends[first][2])
    assert f"pod demo-worker-{first} failed first at {at}: exited with" in done.stderr


def test_a_container_that_was_started_again_is_read_before_its_restart(api):
    """The log of the one that failed, not of the one that runs now."""
    put(api, 0, "now", {"running": {}})
    put(api, 1, "then", {"running": {}}, last=objects.terminated(1, second=20))
    api.logs["demo-worker-1"] = Log([(objects.at(50), "now too")])
    assert logs(api, "--first-failure", "--tail", "5").stdout == "then\n"


def test_without_a_failure_it_is_said(api):
    """Nothing on stdout, and exit code 0."""
    put(api, 0, "fine", {"running": {}})
    done = logs(api, "--first-failure")
    assert (done.exit_code, done.stdout) == (0, "")
    assert "demo is Running, and no pod that is there has failed" in done.stderr


@pytest.mark.parametrize("other", [["-f"], ["--previous"], ["--pod", "1"]])
def test_what_does_not_go_with_it_is_refused(api, other):
    """Exit code 2, and which to leave out."""
    done = logs(api, "--first-failure", *other)
    assert done.exit_code == 2 and "leave" in done.stderr and not api.asked


@pytest.mark.parametrize("follow", [[], ["-f"]])
def test_since_leaves_out_what_is_older(api, follow):
    """Of each pod, followed or not."""
    now = lambda ago: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - ago))  # noqa: E731
    api.put(objects.job("Created", "Succeeded"))
    for index in (0, 1):
        api.put(objects.pod(index, objects.terminated(0), phase="Succeeded"))
        lines = [(now(7300), f"old {index}"), (now(3000), f"new {index}")]
        api.logs[f"demo-worker-{index}"] = Log(lines)
    done = logs(api, "--since", "1h30m", *follow)
    assert sorted(done.stdout.splitlines()) == ["[w0] new 0", "[w1] new 1"]
    assert any("sinceSeconds=5400" in path for path in api.asked)


@pytest.mark.parametrize("text", ["10", "", "-5m", "1d", "5m2h", "0s", "m"])
def test_a_length_of_time_is_as_of_kubectl(api, text):
    """What kubectl refuses is refused, with how to write it."""
    done = logs(api, "--since", text)
    assert done.exit_code == 2 and "as in 45s, 10m or 1h30m" in done.stderr
