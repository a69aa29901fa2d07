"""The transport to the API server, against a real socket."""

import pytest
from support.api_server import Log
from support.writable_api_server import WriteAPI

from gptddp.errors import ClusterError
from gptddp.k8s.cluster import connect, if_allowed


@pytest.fixture
def log(api):
    """The log of a pod."""
    api.put({"kind": "Pod", "metadata": {"name": "demo-worker-0"}})
    api.logs["demo-worker-0"] = Log()
    return api.logs["demo-worker-0"]


def line(second, text):
    return f"2026-11-21T09:00:{second:02}.000000001Z", text


def test_an_object_comes_as_a_plain_dict(api, cluster):
    """What the server has is returned unchanged, and what it has not is None."""
    job = {"kind": "PyTorchJob", "metadata": {"name": "demo", "labels": {"a": "b"}}}
    api.put(job)
    assert cluster.get("PyTorchJob", "demo") == job
    assert cluster.get("PyTorchJob", "other") is None
    assert cluster.find("PyTorchJob", "a=b") == [job] and cluster.find("PyTorchJob", "a=c") == []


def test_what_is_not_there_need_not_be_deleted(tmp_path):
    """Somebody else was faster; any other refusal is an error."""
    api = WriteAPI(tmp_path)
    try:
        cluster = connect(kubeconfig=api.kubeconfig)
        assert cluster.delete("Secret", "none") is False
        api.forbidden = {"DELETE secrets"}
        with pytest.raises(ClusterError, match="forbidden"):
            cluster.delete("Secret", "none")
    finally:
        api.close()


def test_apply_creates_or_merges(tmp_path):
    """An object that is not there is created, one that is there keeps what others have set; a dry
    run changes nothing."""
    api = WriteAPI(tmp_path)
    try:
        cluster = connect(kubeconfig=api.kubeconfig)
        head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "demo"}}
        assert cluster.apply(head | {"data": {"a": "1"}})["data"] == {"a": "1"}
        api.objects["configmaps", "demo"]["data"]["b"] = "theirs"
        assert cluster.apply(head | {"data": {"a": "2"}}, dry_run=True)["data"]["a"] == "2"
        assert api.objects["configmaps", "demo"]["data"] == {"a": "1", "b": "theirs"}
        cluster.apply(head | {"data": {"a": "2"}})
        assert api.objects["configmaps", "demo"]["data"] == {"a": "2", "b": "theirs"}
    finally:
        api.close()


def test_what_is_forbidden_is_done_without_and_nothing_else(tmp_path):
    """`if_allowed` gives the other value for a 403; every other failure is raised."""
    api = WriteAPI(tmp_path)
    try:
        cluster = connect(kubeconfig=api.kubeconfig)
        assert if_allowed(lambda: cluster.find("Pod"), None) == []
        api.secrets_are_hidden = True
        assert if_allowed(lambda: cluster.get("Secret", "demo"), "hidden") == "hidden"
        api.down = True
        with pytest.raises(ClusterError, match="currently unable"):
            if_allowed(lambda: cluster.find("Pod"), None)
    finally:
        api.close()


def test_a_refusal_keeps_the_servers_words(api, cluster):
    """Message and status of the answer are in the error."""
    api.down = True
    with pytest.raises(ClusterError, match="currently unable") as caught:
        cluster.find("Pod")
    assert caught.value.status == 503


def test_a_server_that_is_away_is_named(api, cluster):
    """Nobody listens: the address and what to look at, and no status."""
    api.close()
    with pytest.raises(
        ClusterError, match="cannot reach the cluster at http://127.0.0.1"
    ) as caught:
        cluster.find("Pod")
    assert caught.value.status == 0


def test_a_log_comes_in_lines(log, cluster):
    """Lines with their times; an answer of megabytes too."""
    lines = log.lines = [line(n % 60, "x" * 1000 + str(n)) for n in range(3000)]
    assert list(cluster.log("demo-worker-0")) == [f"{t} {text}" for t, text in lines]


def test_a_last_line_that_has_no_end_yet_comes_too(log, cluster):
    """As of a container that ends in the middle of one."""
    log.lines = [line(1, "one"), line(2, "two")]
    log.end_after = [len(log.text()) - 1]
    assert list(cluster.log("demo-worker-0")) == [" ".join(it) for it in log.lines]


def test_a_broken_log_is_an_error_after_whole_lines(log, cluster):
    """No torn line is given when the connection breaks inside one."""
    log.lines = [line(1, "one"), line(2, "two")]
    log.break_after = [len(log.text()) - 2]
    seen = []
    with pytest.raises(ClusterError):
        for text in cluster.log("demo-worker-0"):
            seen.append(text)
    assert seen == [" ".join(line(1, "one"))]


def test_a_silent_log_is_given_up(log, cluster):
    """A follower asks for an error after a time without a byte."""
    log.lines, log.done = [line(1, "one")], False
    lines = cluster.log("demo-worker-0", follow=True, quiet_s=0.3)
    assert next(lines) == " ".join(line(1, "one"))
    with pytest.raises(ClusterError):
        next(lines)
