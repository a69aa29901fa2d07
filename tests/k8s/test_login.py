"""Which API server is asked, and as whom: where the package `kubernetes` would do it otherwise."""

import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading

import certifi
import pytest
from support.api_server import FakeAPI, _Handler

from gptddp.errors import ClusterError
from gptddp.k8s.cluster import connect

V1 = "client.authentication.k8s.io/v1"


class HeaderAPI(FakeAPI):
    """Keeps the token of every request, and refuses those that a test names."""

    def __init__(self, folder):
        self.tokens, self.refused = [], set()

        class Handler(_Handler):
            def do_GET(handler):
                self.tokens.append(handler.headers.get("Authorization", "").removeprefix("Bearer "))
                if self.tokens[-1] in self.refused:
                    return handler._status(401, "Unauthorized")
                super().do_GET()

        self.handler = Handler
        super().__init__(folder)

    def as_user(self, **user):
        """A cluster for a user with these entries."""
        return connect(None, kubeconfig(self.kubeconfig, self.url, users=named("u", user=user)))


@pytest.fixture
def api(tmp_path):
    server = HeaderAPI(tmp_path)
    yield server
    server.close()


def named(name, **entry):
    return [{"name": name, **entry}]


def kubeconfig(path, server="http://127.0.0.1:9", **entries):
    """Write a kubeconfig of one context; `entries` replace whole parts, None leaves one out."""
    cluster = server if isinstance(server, dict) else {"server": server}
    config = {
        "current-context": "x",
        "clusters": named("c", cluster=cluster),
        "users": named("u", user={}),
        "contexts": named("x", context={"cluster": "c", "user": "u"}),
    }
    config |= {key.replace("_", "-"): value for key, value in entries.items()}
    path.write_text(json.dumps({key: it for key, it in config.items() if it is not None}))
    return path


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"current_context": None}, "there is no context .none is current. in the kubeconfig"),
        ({"current_context": "no"}, "no context no in the kubeconfig {path}: .* there are x"),
        ({"contexts": []}, "there are none"),
        ({"contexts": {"x": {}}}, "{path} cannot be used .*kubectl config view"),
        ({"clusters": []}, "Expected object with name c in {path}/clusters list"),
        ({"users": []}, "Expected object with name u in {path}/users list"),
        ({"server": {}}, "Expected key server"),
        ({"server": {"server": 3}}, "{path} cannot be used"),
        (": [yaml", "{path} cannot be used .*line 1"),
        ("just text", "{path} cannot be used"),
        ("", "{path} file is empty"),
    ],
)
def test_what_is_wrong_in_a_kubeconfig_is_an_error_that_names_it(tmp_path, entries, words):
    """The file and what is wrong, and never a server that nobody has named."""
    path = tmp_path / "config"
    if isinstance(entries, str):
        path.write_text(entries)
    else:
        kubeconfig(path, **entries)
    with pytest.raises(ClusterError, match=words.format(path=path)):
        connect(None, path)


def test_a_kubeconfig_that_is_not_there_is_named_with_the_way_without(tmp_path, monkeypatch):
    """That of the flag, of the variable, or of the home."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    with pytest.raises(ClusterError, match=r"no file ~/.kube/config; .*--local"):
        connect()
    with pytest.raises(ClusterError, match="no file .*/none;"):
        connect(None, tmp_path / "none")
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    with pytest.raises(ClusterError, match="no file .*/a:.*/b;"):
        connect()


def test_of_several_files_the_first_current_context_counts(tmp_path, monkeypatch):
    """As for kubectl, so that both ask the same cluster; an empty one sets none."""
    there = {"cluster": "c", "user": "u", "namespace": "ml"}
    kubeconfig(tmp_path / "none", contexts=[], clusters=[], users=[], current_context="")
    kubeconfig(tmp_path / "one", "http://one", contexts=named("x", context=there))
    kubeconfig(tmp_path / "two", "http://two", current_context="y", contexts=named("y", context={}))
    monkeypatch.setenv("KUBECONFIG", ":".join(str(tmp_path / it) for it in ("none", "one", "two")))
    assert (connect().server, connect().namespace) == ("http://one", "ml")
    assert connect("mine").namespace == "mine"


def test_a_pod_has_its_service_account(tmp_path, monkeypatch):
    """Where no kubeconfig is there; not in the place of one that is named."""
    for name, text in (("token", "secret"), ("namespace", "ml\n"), ("ca.crt", "")):
        (tmp_path / name).write_text(text)
    shutil.copy(certifi.where(), tmp_path / "ca.crt")
    for name, file in (("TOKEN", "token"), ("CERT", "ca.crt")):
        setting = f"kubernetes.config.incluster_config.SERVICE_{name}_FILENAME"
        monkeypatch.setattr(setting, str(tmp_path / file))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    cluster = connect()
    assert (cluster.namespace, cluster.server) == ("ml", "https://[fd00::1]:443")
    with pytest.raises(ClusterError, match="no file .*/none;"):
        connect(None, tmp_path / "none")


# -- as whom -------------------------------------------------------------------------------------


def plugin(script, **entries):
    return {"exec": {"apiVersion": V1, "command": "sh", "args": ["-c", script], **entries}}


def credential(token):
    return f"""echo '{{"apiVersion": "{V1}", "kind": "ExecCredential", "status": {token}}}'"""


@pytest.mark.parametrize(
    ("user", "words"),
    [
        (
            plugin("echo no session >&2; exit 3"),
            "user u .* no login: .*returned 3. no session; log",
        ),
        (plugin("", command="no-login", installHint="get\nit"), "'no-login'; get it"),
        (plugin("echo hello"), "user u .* no login: .*decode"),
        (plugin(credential("{}")), "user u .* no login: .*missing token"),
        ({"auth-provider": {"name": "azure"}}, "user u .* no login: no credentials; log in again"),
        ({"token": ""}, "user u .* no login: no credentials; log in again"),
        ({"tokenFile": "none"}, "none"),
        ({"token": "t", "as": "dev"}, "user u .* acts for another .`as`"),
        ({"token": "t", "as-groups": ["dev"]}, "user u .* acts for another .`as-groups`"),
    ],
)
def test_without_a_login_nothing_is_asked(api, user, words):
    """Never as nobody, or as another: the refusal would speak of rights, and not of the login."""
    with pytest.raises(ClusterError, match=words):
        api.as_user(**user).find("Pod")
    assert api.asked == []


def test_a_login_that_is_refused_is_made_once_more(api, tmp_path):
    """A token that a file or a program has given may have run out; a second refusal is the end."""
    (tmp_path / "token").write_text("old")
    cluster = api.as_user(tokenFile="token")
    cluster.find("Pod")
    api.refused.add("old")
    (tmp_path / "token").write_text("new")
    cluster.find("Pod")
    cluster.find("Pod")
    assert api.tokens == ["old", "old", "new", "new"]
    count = f"echo x >> {tmp_path}/runs; n=$(wc -l < {tmp_path}/runs)\n"
    cluster = api.as_user(**plugin(count + credential('{"token": "\'$n\'"}')))
    cluster.find("Pod")
    api.refused |= {"1", "2", "3"}
    with pytest.raises(ClusterError, match="does not accept who you are .* log in again"):
        cluster.find("Pod")
    assert api.tokens[4:] == ["1", "1", "2"]


# -- on the way ----------------------------------------------------------------------------------


@pytest.fixture
def tls_api(api, tmp_path):
    """The API server behind TLS, by a certificate as EKS has it: without a key identifier."""
    if not shutil.which("openssl"):
        pytest.skip("needs openssl")
    new = "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    (tmp_path / "names").write_text("subjectAltName=DNS:api.test")
    for command in (
        f"{new} -x509 -keyout ca.key -out ca.pem -subj /CN=ca",
        f"{new} -x509 -keyout other.key -out other.pem -subj /CN=other",
        f"{new} -keyout own.key -out csr -subj /CN=own",
        "x509 -req -in csr -CA ca.pem -CAkey ca.key -CAcreateserial -extfile names -out own.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "own.pem", tmp_path / "own.key")
    api.server.socket = context.wrap_socket(api.server.socket, server_side=True)
    return {"server": api.url.replace("http:", "https:"), "tls-server-name": "api.test"}


def test_a_certificate_is_checked_as_kubectl_checks_it(tls_api, tmp_path, monkeypatch, capsys):
    """By the kubeconfig's authority, and not more strictly, as Python 3.13 would."""
    real = ssl.create_default_context

    def strict(*args, **named):
        context = real(*args, **named)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)

    def find(**entries):
        return connect(None, kubeconfig(tmp_path / "config", tls_api | entries)).find("Pod")

    assert find(**{"certificate-authority": "ca.pem"}) == []
    assert find(**{"insecure-skip-tls-verify": True}) == []
    for wrong in ({"certificate-authority": "other.pem"}, {}):
        with pytest.raises(ClusterError, match="cannot reach .*certificate verify failed"):
            find(**wrong)
    assert capsys.readouterr().err == ""


@pytest.fixture
def proxy(api):
    """An HTTP proxy on the way to `api`, whatever is asked for; `proxy.asked` has its requests."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # the test is over
                return
            proxy.asked.append(connection.recv(2**16))
            body = b'{"kind": "List", "items": []}'
            head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
            connection.sendall(head % len(body) + body)
            connection.close()

    proxy = type("Proxy", (), {"asked": []})
    proxy.url = f"http://me:p%40ss@127.0.0.1:{listener.getsockname()[1]}"
    threading.Thread(target=serve, daemon=True).start()
    yield proxy
    listener.close()


def test_a_proxy_is_used_as_by_kubectl(api, proxy, tmp_path, monkeypatch):
    """One of the environment but for this machine, one of the kubeconfig always; with password."""
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", "other.test")
    monkeypatch.setenv("http_proxy", proxy.url)

    def find(server, **entries):
        entries = {"server": server, **entries}
        return connect(None, kubeconfig(tmp_path / "config", entries)).find("Pod")

    assert find("http://api.test:81") == []
    assert proxy.asked[0].startswith(b"GET http://api.test:81/api/v1/")
    assert b"proxy-authorization: basic bwu6cebzcw==" in proxy.asked[0].lower()
    assert find(api.url) == [] and len(proxy.asked) == 1
    assert find(api.url, **{"proxy-url": proxy.url}) == [] and len(proxy.asked) == 2
    with pytest.raises(ClusterError, match="cannot reach the cluster at http://other.test"):
        find("http://other.test")


def test_without_the_package_it_is_told_how_to_get_it(tmp_path):
    """Exit code 2, and no traceback."""
    code = (
        "import sys; sys.modules['kubernetes'] = None\nfrom gptddp.k8s.cli.main import cli; cli()"
    )
    path = kubeconfig(tmp_path / "config")
    command = [sys.executable, "-c", code, "list", "--kubeconfig", str(path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "needs the package kubernetes: pip install 'gptddp[k8s]'" in result.stderr
