"""Which API server is asked, and as whom: kubectl's configuration, and what is wrong in it."""

import base64
import json
import sys
import textwrap
import time

import pytest
from support.api_server import FakeAPI, _Handler

from gptddp.errors import ClusterError
from gptddp.k8s.cluster import connect


class HeaderAPI(FakeAPI):
    """Keeps the headers of every request, and refuses tokens that a test names."""

    def __init__(self, folder):
        self.headers, self.refused = [], set()

        class Handler(_Handler):
            def do_GET(handler):
                self.headers.append(handler.headers)
                if handler.headers.get("Authorization") in self.refused:
                    return handler._status(401, "Unauthorized")
                super().do_GET()

        self.handler = Handler
        super().__init__(folder)

    def as_user(self, **user):
        """A cluster for a user with these entries."""
        config = json.loads(self.kubeconfig.read_text())
        config["users"][0]["user"] = user
        self.kubeconfig.write_text(json.dumps(config))
        return connect(None, self.kubeconfig)


@pytest.fixture
def server_in():
    return HeaderAPI


def write(path, server="http://127.0.0.1:9", context="x", **entries):
    """A kubeconfig of one context; `entries` replace whole parts, None leaves one out."""
    config = {
        "current-context": context,
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
    }
    config |= {key.replace("_", "-"): value for key, value in entries.items()}
    kept = {key: value for key, value in config.items() if value is not None}
    path.write_text(json.dumps(kept))
    return path


def server_of(path=None, context=None):
    return connect(None, path, context)._server


CONTEXT = {"cluster": "c", "user": "u"}


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"current_context": None}, "has no current-context: name one with --context"),
        ({"current_context": "nope"}, "there is no context nope in the kubeconfig"),
        ({"contexts": []}, "it has none"),
        ({"contexts": {"x": {}}}, "contexts must be a list of tables with name and context"),
        ({"clusters": [{"name": "c", "cluster": "http://x"}]}, "clusters must be a list"),
        ({"users": [{"user": {}}]}, "users must be a list of tables with name"),
        ({"users": []}, "context x in {path} names the user u, which is not there"),
        ({"clusters": []}, "names the cluster c, which is not there"),
        ({"contexts": [{"name": "x", "context": {}}]}, "the cluster (none), which is not there"),
        ({"clusters": [{"name": "c", "cluster": {}}]}, "server is '': it must be of the form http"),
        ({"server": "127.0.0.1:6443"}, "it must be of the form http://HOST:PORT or https://"),
        ({"server": "ftp://x"}, "the cluster c in {path}: server is 'ftp://x'"),
        ({"server": "https://x:port"}, "it must be of the form"),
        ({"clusters": [{"name": "c", "cluster": {"server": 3}}]}, "server is 3: it must be a str"),
        ({"contexts": [{"name": "x", "context": CONTEXT | {"namespace": "../.."}}]}, "'../..'"),
    ],
)
def test_what_is_wrong_in_a_kubeconfig_is_named(tmp_path, entries, words):
    """The file, the entry in it and what it must be."""
    path = write(tmp_path / "config", **entries)
    with pytest.raises(ClusterError) as caught:
        connect(None, path)
    assert words.format(path=path) in str(caught.value) and str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (": bad: [yaml", "line 1 is not YAML"),
        ("a: 1\nb: [", "is not YAML"),
        ("\x00", "is not YAML"),
        ("just text", "is no table of clusters, users and contexts"),
        ("- a", "is no table"),
        ("", "has no current-context"),
    ],
)
def test_a_file_that_is_no_kubeconfig_is_named(tmp_path, text, words):
    """As what it is, whatever it is."""
    (tmp_path / "config").write_text(text)
    with pytest.raises(ClusterError, match=words) as caught:
        connect(None, tmp_path / "config")
    assert str(tmp_path / "config") in str(caught.value)


def test_a_kubeconfig_that_is_not_there_is_named_with_what_named_it(tmp_path, monkeypatch):
    """The flag, the variable, or the home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(ClusterError, match=r"home/.kube/config \(default\).*--local"):
        connect()
    with pytest.raises(ClusterError, match=r"/none \(--kubeconfig\)"):
        connect(None, tmp_path / "none")
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    with pytest.raises(ClusterError, match=r"/a, .*/b \(KUBECONFIG\)"):
        connect()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path))
    with pytest.raises(ClusterError, match="cannot read the kubeconfig .*: Is a directory"):
        connect()


def test_of_several_files_the_first_that_has_a_name_counts(tmp_path, monkeypatch):
    """As kubectl merges KUBECONFIG; files that are not there are left out."""
    other = [{"name": "y", "context": {"cluster": "c", "user": "u", "namespace": "ml"}}]
    one = write(tmp_path / "one", server="http://127.0.0.1:1", context=None, users=None)
    two = write(tmp_path / "two", server="http://127.0.0.1:2", context="y", contexts=other)
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'none'}:{one}::{two}")
    assert server_of() == server_of(context="x") == "http://127.0.0.1:1"
    assert connect().namespace == "ml" and connect(context="x").namespace == "default"
    assert connect("mine").namespace == "mine"


def test_a_pod_has_its_service_account(tmp_path, monkeypatch):
    """Where there is no kubeconfig; one that is named and not there is an error even then."""
    for name, text in (("token", "secret\n"), ("namespace", "ml"), ("ca.crt", "")):
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("gptddp.k8s.kubeconfig._ACCOUNT", tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    cluster = connect()
    assert (cluster.namespace, cluster._server) == ("ml", "https://[fd00::1]:443")
    with pytest.raises(ClusterError, match="--kubeconfig"):
        connect(None, tmp_path / "none")


# -- as whom -------------------------------------------------------------------------------------


def authorization(api):
    return api.headers[-1].get("Authorization")


def test_tokens_and_passwords_reach_the_server(api, tmp_path):
    """A token, one in a file beside the kubeconfig, name and password, or nobody."""
    api.as_user(token="one\n").find("Pod")
    assert authorization(api) == "Bearer one"
    (tmp_path / "token").write_text("two\n")
    api.as_user(tokenFile="token", token="old").find("Pod")
    assert authorization(api) == "Bearer two"
    api.as_user(username="me", password="pass").find("Pod")
    assert authorization(api) == "Basic " + base64.b64encode(b"me:pass").decode()
    api.as_user().find("Pod")
    assert authorization(api) is None
    with pytest.raises(ClusterError, match=r"user u in .*tokenFile .*none: No such file"):
        api.as_user(tokenFile="none").find("Pod")


def test_a_token_in_a_file_is_read_again_when_it_is_refused(api, tmp_path):
    """The kubelet replaces it."""
    (tmp_path / "token").write_text("old")
    cluster = api.as_user(tokenFile="token")
    cluster.find("Pod")
    api.refused.add("Bearer old")
    (tmp_path / "token").write_text("new")
    cluster.find("Pod")
    assert authorization(api) == "Bearer new"


def test_who_acts_for_another_says_so(api):
    """Impersonation, which no request may lose."""
    user = {"as": "dev", "as-groups": ["a", "b"], "as-user-extra": {"scope": ["x"]}}
    api.as_user(token="t", **user).find("Pod")
    headers = api.headers[-1]
    assert headers["Impersonate-User"] == "dev" and headers["Impersonate-Extra-scope"] == "x"
    assert headers.get_all("Impersonate-Group") == ["a", "b"]


def test_the_old_way_of_openid_connect_needs_a_token_that_is_valid(api):
    """Its own token is used until its end; kubectl gets the next one."""

    def provider(end):
        claims = base64.urlsafe_b64encode(json.dumps({"exp": end}).encode()).decode().rstrip("=")
        return {"name": "oidc", "config": {"id-token": f"head.{claims}.sign"}}

    valid = provider(time.time() + 60)
    api.as_user(**{"auth-provider": valid}).find("Pod")
    assert authorization(api) == f"Bearer {valid['config']['id-token']}"
    for user in (provider(time.time() - 60), {"name": "oidc"}, "oidc"):
        with pytest.raises(ClusterError, match="`kubectl get pods` with this context renews it"):
            api.as_user(**{"auth-provider": user}).find("Pod")


V1 = "client.authentication.k8s.io/v1"


@pytest.fixture
def plugin(tmp_path):
    """plugin(what it prints, exit code, **entries): an exec plugin that counts its runs."""

    def make(status, code=0, **entries):
        said = status if isinstance(status, str) else json.dumps({"status": status})
        program = tmp_path / "login"
        program.write_text(
            textwrap.dedent(f"""\
            #!{sys.executable}
            import os, sys
            at = {str(tmp_path)!r}
            open(at + "/runs", "a").write("x")
            open(at + "/info", "w").write(os.environ["KUBERNETES_EXEC_INFO"])
            said = {said!r}.replace("ARGS", "-".join(sys.argv[1:]) + os.environ.get("MORE", ""))
            print(said.replace("RUN", str(len(open(at + "/runs").read()))))
            sys.exit({code})
            """)
        )
        program.chmod(0o755)
        return {"apiVersion": V1, "command": "./login", **entries}

    return make


def test_an_exec_plugin_gives_the_token(api, plugin, tmp_path):
    """With its arguments and variables; once for many requests, and again for one refused."""
    more = {"args": ["a", "b"], "env": [{"name": "MORE", "value": "+"}], "provideClusterInfo": True}
    cluster = api.as_user(exec=plugin({"token": "ARGS-RUN"}, **more))
    cluster.find("Pod")
    cluster.find("Pod")
    assert authorization(api) == "Bearer a-b+-1"
    info = json.loads((tmp_path / "info").read_text())
    assert info["apiVersion"] == V1 and info["spec"]["cluster"]["server"] == cluster._server
    assert info["spec"]["interactive"] is False  # there is no terminal
    api.refused.add("Bearer a-b+-1")
    cluster.find("Pod")
    assert authorization(api) == "Bearer a-b+-2"
    api.refused.add("Bearer a-b+-3")
    api.refused.add("Bearer a-b+-2")
    with pytest.raises(ClusterError, match="log in again"):  # twice, and no more
        cluster.find("Pod")


def test_a_token_that_has_expired_is_replaced(api, plugin):
    """Before the server refuses it."""
    ended = plugin({"token": "RUN", "expirationTimestamp": "2026-01-01T00:00:00Z"})
    cluster = api.as_user(exec=ended)
    cluster.find("Pod")
    cluster.find("Pod")
    assert authorization(api) == "Bearer 2"


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"command": "no-such-login"}, "no-such-login is not installed, or not on PATH; install"),
        ({"command": "./none", "installHint": "get\nit"}, "not on PATH: get it"),
        ({"command": ""}, "(no command) is not installed"),
        ({"apiVersion": "client.authentication.k8s.io/v1alpha1"}, "apiVersion"),
        ({"args": "a"}, "args must be a list of strings"),
        ({"env": {"A": "b"}}, "env must be a list"),
        ({"interactiveMode": "Always"}, "asks for a login at a terminal"),
        ({"status": "no JSON"}, "did not print an ExecCredential"),
        ({"status": "[]"}, "did not print an ExecCredential"),
        ({"status": {}}, "gave neither a token nor a certificate"),
        ({"code": 3}, "ended with exit code 3: log in again"),
    ],
)
def test_without_the_plugins_answer_nothing_is_asked(api, plugin, monkeypatch, entries, words):
    """Never as nobody: the refusal would speak of rights, and not of the login."""
    monkeypatch.setattr("sys.stdin", None)
    status, code = entries.pop("status", {"token": "t"}), entries.pop("code", 0)
    cluster = api.as_user(exec=plugin(status, code) | entries)
    with pytest.raises(ClusterError) as caught:
        cluster.find("Pod")
    assert words in str(caught.value) and "user u in" in str(caught.value)
    assert api.asked == []
