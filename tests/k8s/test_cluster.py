"""What the one module over the package `kubernetes` promises, against a real socket."""

import contextlib
import socket
import threading

import pytest
from support.api_server import Log

from gptddp.errors import ConfigError
from gptddp.k8s.cluster import connect
from gptddp.k8s.exit_codes import ClusterError

# -- objects -------------------------------------------------------------------------------------


def test_what_is_not_there_need_not_be_deleted(api, cluster):
    """Somebody else was faster; any other refusal is an error."""
    assert cluster.delete("Secret", "none") is False
    api.forbidden = {"DELETE secrets"}
    with pytest.raises(ClusterError, match="forbidden"):
        cluster.delete("Secret", "none")


# -- what a server answers -----------------------------------------------------------------------


@pytest.fixture
def answering(tmp_path, api):
    """answering(*bytes): a cluster at which each request is answered by the next of them."""
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
        ([http(PAGE, "502 Bad Gateway", "text/html")], "502 Bad Gateway, and not as"),
        ([http(PAGE, "404 Not Found", "text/html")] * 2, OTHER),
        ([NONE, NONE], OTHER),
        ([NONE, http(PAGE, kind="text/html")], OTHER),
        ([NONE, VERSION], "the cluster has no PyTorchJob; install the Kubeflow training operator"),
        ([http(b'{"a"', length=100)], "cannot reach .*IncompleteRead"),
        ([b"SSH-2.0-OpenSSH\r\n"], "cannot reach the cluster at {}: .*SSH-2.0"),
        ([b""], "cannot reach the cluster at {}: .*closed connection without response"),
    ],
)
def test_what_is_no_api_server_is_named_so(answering, answers, words):
    """A login page, a proxy, another program: its address is told, and not a missing operator."""
    cluster = answering(*answers)
    with pytest.raises(ClusterError, match=words.format(cluster.server)):
        cluster.get("PyTorchJob", "demo")


HOOK = "failed calling webhook: Post https://kueue-webhook.kueue-system.svc:443/mutate"


@pytest.mark.parametrize(
    ("status", "message", "words"),
    [
        (503, "the server is unable", "^the server is unable$"),
        (401, "Unauthorized", r"does not accept who you are \(Unauthorized\): log in again"),
        (403, "U cannot list pods", "^U cannot list pods; ask for the right, or use .*--context"),
        (500, "failed calling webhook x", "^failed calling webhook x; is it running"),
        (500, HOOK, f"^{HOOK}; is kueue-webhook running. `kubectl get pods -n kueue-system`$"),
        (404, "the server could not find the requested resource", "does not know kueue.x-k8s.io/v"),
    ],
)
def test_a_refusal_keeps_the_servers_words(api, cluster, status, message, words):
    """Its message and status are in the error, with the fix where there is one."""
    path = "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads"
    api.paths[path] = (status, message)
    with pytest.raises(ClusterError, match=words) as caught:
        cluster.find("Workload")
    assert caught.value.status == status


def test_no_name_leads_to_another_address(api, cluster):
    """What a name has of an address's own characters is quoted, and no name is refused."""
    assert cluster.get("Pod", "../../x?a=1#b c") is None
    assert api.asked[-1].endswith("/namespaces/default/pods/..%2F..%2Fx%3Fa%3D1%23b%20c")
    for name in ("", ".", ".."):
        with pytest.raises(ConfigError, match="cannot name a Pod"):
            cluster.delete("Pod", name)
    assert len(api.asked) == 1


def test_what_may_have_been_done_is_not_asked_twice(answering):
    """The server closes the connection without an answer: a second POST could create two."""
    cluster = answering(b"", http(b'{"kind": "Pod"}'))
    with pytest.raises(ClusterError):
        cluster.create({"kind": "Pod", "metadata": {"name": "demo"}})
    assert len(answering.asked) == 1


# -- logs ----------------------------------------------------------------------------------------


@pytest.fixture
def log(api):
    """The log of a pod, of two lines."""
    api.put({"kind": "Pod", "metadata": {"name": "demo-worker-0"}})
    api.logs["demo-worker-0"] = Log([line(1, "one"), line(2, "two")])
    return api.logs["demo-worker-0"]


def line(second, text):
    return f"2026-11-21T09:00:{second:02}.000000001Z", text


def test_a_last_line_that_has_no_end_yet_comes_too(log, cluster):
    """As of a container that ends in the middle of one; with `keep_ends` it can be told."""
    log.end_after = [len(log.text()) - 1] * 2
    assert list(cluster.log("demo-worker-0")) == [" ".join(it) for it in log.lines]
    first, last = cluster.log("demo-worker-0", keep_ends=True)
    assert first.endswith("one\n") and last.endswith("two")


def test_a_silent_log_is_given_up(log, cluster):
    """A follower asks for an error after a time without a byte."""
    log.done = False
    lines = cluster.log("demo-worker-0", follow=True, quiet_s=0.3)
    assert [next(lines), next(lines)] == [" ".join(it) for it in log.lines]
    with pytest.raises(ClusterError, match="timed out"):
        next(lines)
