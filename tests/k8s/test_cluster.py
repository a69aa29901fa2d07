"""`gptddp.k8s.cluster`, our layer over the package `kubernetes`, against a real socket."""

import contextlib
import socket
import threading

import pytest
from support.api_server import Log

from gptddp.errors import ConfigError
from gptddp.k8s.cluster import connect
from gptddp.k8s.exit_codes import ClusterError

# -- objects -------------------------------------------------------------------------------------


def test_deleting_a_missing_object_is_no_error(api, cluster):
    """Somebody else may have deleted it first; any other refusal is an error."""
    assert cluster.delete("Secret", "none") is False
    api.forbidden = {"DELETE secrets"}
    with pytest.raises(ClusterError, match="forbidden"):
        cluster.delete("Secret", "none")


# -- answers of a server -------------------------------------------------------------------------


@pytest.fixture
def answering(tmp_path, api):
    """answering(*bytes): a cluster that answers each request with the next of these."""
    listener = socket.create_server(("127.0.0.1", 0))
    asked = []

    def serve(answers):
        with contextlib.suppress(OSError):  # the test is over
            for answer in answers:
                with listener.accept()[0] as connection:
                    asked.append(connection.recv(2**16))
                    connection.sendall(answer)

    def start(*answers):
        threading.Thread(target=serve, args=(answers,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        path = tmp_path / "config"
        path.write_text(api.kubeconfig.read_text().replace(api.url, url))
        return connect(None, path)

    start.asked = asked
    yield start
    listener.close()


def http(body, status="200 OK", kind="application/json", length=None, more=""):
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nConnection: close\r\n{more}"
    return f"{head}Content-Length: {length or len(body)}\r\n\r\n".encode() + body


PAGE, TEXT = b"<html>Sign in</html>", b"404 page not found\n"  # by nginx; by a server in Go
NONE = http(TEXT, "404 Not Found", "text/plain")
VERSION = http(b'{"gitVersion": "v1.34.1"}')
OTHER = "{} answers with .*, unlike the API server of a cluster"


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([http(PAGE, kind="text/html")], f"{OTHER}.*login page"),
        ([http(b"[]")], OTHER),
        ([http(b'{"login": "now"}')], OTHER),
        ([http(b"[" * 100_000)], OTHER),
        ([http(PAGE, "302 Found", more="Location: https://sso\r\n")], "302 Found, to https://sso"),
        ([http(PAGE, "502 Bad Gateway", "text/html")], "502 Bad Gateway, unlike"),
        ([http(PAGE, "404 Not Found", "text/html")] * 2, OTHER),
        ([NONE, NONE], OTHER),
        ([NONE, http(PAGE, kind="text/html")], OTHER),
        ([NONE, VERSION], "the cluster has no PyTorchJob; install the Kubeflow training operator"),
        ([http(b'{"a"', length=100)], "cannot reach .*IncompleteRead"),
        ([b"SSH-2.0-OpenSSH\r\n"], "cannot reach the cluster at {}: .*SSH-2.0"),
        ([b""], "cannot reach the cluster at {}: .*closed connection without response"),
    ],
)
def test_a_server_that_is_no_api_server_is_named(answering, answers, words):
    """The error has the address of the login page, proxy or program, and does not suggest to
    install the operator."""
    cluster = answering(*answers)
    with pytest.raises(ClusterError, match=words.format(cluster.server)):
        cluster.get("PyTorchJob", "demo")


HOOK = "failed calling webhook: Post https://kueue-webhook.kueue-system.svc:443/mutate"


@pytest.mark.parametrize(
    ("status", "message", "words"),
    [
        (503, "the server is unable", "^the server is unable$"),
        (401, "Unauthorized", r"does not accept your login \(Unauthorized\): log in again"),
        (403, "U cannot list pods", "^U cannot list pods; ask for the right, or use .*--context"),
        (500, "failed calling webhook x", "^failed calling webhook x; is it running"),
        (500, HOOK, f"^{HOOK}; is kueue-webhook running. `kubectl get pods -n kueue-system`$"),
        (404, "the server could not find the requested resource", "does not know kueue.x-k8s.io/v"),
    ],
)
def test_a_refusal_keeps_the_servers_words(api, cluster, status, message, words):
    """The error has the server's message and status, and the fix if there is one."""
    path = "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads"
    api.paths[path] = (status, message)
    with pytest.raises(ClusterError, match=words) as caught:
        cluster.find("Workload")
    assert caught.value.status == status


def test_a_name_cannot_change_the_path(api, cluster):
    """Characters with a meaning in paths are quoted; an empty name is refused."""
    assert cluster.get("Pod", "../../x?a=1#b c") is None
    assert api.asked[-1].endswith("/namespaces/default/pods/..%2F..%2Fx%3Fa%3D1%23b%20c")
    for name in ("", ".", ".."):
        with pytest.raises(ConfigError, match="cannot name a Pod"):
            cluster.delete("Pod", name)
    assert len(api.asked) == 1


def test_a_request_that_may_have_succeeded_is_not_repeated(answering):
    """The server closes the connection without an answer: a second POST could create two."""
    cluster = answering(b"", http(b'{"kind": "Pod"}'))
    with pytest.raises(ClusterError):
        cluster.create({"kind": "Pod", "metadata": {"name": "demo"}})
    assert len(answering.asked) == 1


# -- logs ----------------------------------------------------------------------------------------


@pytest.fixture
def log(api):
    """The two-line log of a pod."""
    api.put({"kind": "Pod", "metadata": {"name": "demo-worker-0"}})
    api.logs["demo-worker-0"] = Log([line(1, "one"), line(2, "two")])
    return api.logs["demo-worker-0"]


def line(second, text):
    return f"2026-11-21T09:00:{second:02}.000000001Z", text


def test_a_last_line_without_an_end_is_returned_too(log, cluster):
    """A container may end in the middle of a line; `keep_ends` makes that visible."""
    log.end_after = [len(log.text()) - 1] * 2
    assert list(cluster.log("demo-worker-0")) == [" ".join(it) for it in log.lines]
    first, last = cluster.log("demo-worker-0", keep_ends=True)
    assert first.endswith("one\n") and last.endswith("two")


def test_a_silent_log_is_given_up(log, cluster):
    """With `quiet_s`, a log that is silent for that time is an error."""
    log.done = False
    lines = cluster.log("demo-worker-0", follow=True, quiet_s=0.3)
    assert [next(lines), next(lines)] == [" ".join(it) for it in log.lines]
    with pytest.raises(ClusterError, match="timed out"):
        next(lines)
