"""What can be at the other end of an address, and on the way to it."""

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time

import pytest

from gptddp.errors import ClusterError, ConfigError
from gptddp.k8s.cluster import connect


@pytest.fixture
def answering(tmp_path):
    """answering(*bytes): a cluster at which each connection is answered by the next of them."""
    listener = socket.create_server(("127.0.0.1", 0))
    seen = []

    def serve(answers):
        for answer in answers:
            with contextlib.suppress(OSError):  # the test is over
                asked = b""
                while not asked:  # at first it only looks whether there is somebody
                    with listener.accept()[0] as connection:
                        if asked := connection.recv(2**16):
                            seen.append(asked)
                            connection.sendall(answer)

    def start(*answers):
        threading.Thread(target=serve, args=(answers,), daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        return connect(None, kubeconfig(tmp_path, {"server": url}))

    start.seen = seen
    yield start
    listener.close()


def kubeconfig(folder, cluster, user=None):
    path = folder / "config"
    path.write_text(
        json.dumps(
            {
                "current-context": "x",
                "clusters": [{"name": "c", "cluster": cluster}],
                "users": [{"name": "u", "user": user or {}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            }
        )
    )
    return path


def http(body, status="200 OK", kind="application/json", length=None, more=""):
    size = len(body) if length is None else length
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n{more}\r\n"
    return head.encode() + body


PAGE = b"<html>Sign in</html>"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (http(PAGE, kind="text/html"), "answers with text/html, and not as the API server"),
        (http(b"[]"), "not as the API server of a cluster does"),
        (http(b'"ok"'), "not as the API server"),
        (http(b'{"login": "now"}'), "not as the API server"),
        (http(b"[" * 100_000), "not as the API server"),
        (http(PAGE, "302 Found", more="Location: https://sso\r\n"), "302 Found, to https://sso"),
        (http(PAGE, "502 Bad Gateway", "text/html"), "the API server answered 502 Bad Gateway"),
        (http(b'{"a"', length=100), "the answer broke off"),
        (b"SSH-2.0-OpenSSH\r\n", "the answer is no HTTP"),
        (b"", "closed connection without response"),
    ],
)
def test_what_is_no_api_server_is_named_so(answering, answer, words):
    """A login page, a proxy, another program: an error that names the address, no traceback."""
    cluster = answering(answer)
    with pytest.raises(ClusterError) as caught:
        cluster.get("Pod", "demo")
    assert words in str(caught.value)
    if "answered" not in str(caught.value):
        assert cluster._server in str(caught.value)


def test_no_name_leads_to_another_address(answering):
    """What a name has of an address's own characters is quoted, and no name is refused."""
    gone = http(b'{"message": "not found"}', "404 Not Found")
    cluster = answering(*[gone] * 2)
    assert cluster.get("Pod", "../../x?a=1#b c") is None
    assert (
        b"GET /api/v1/namespaces/default/pods/..%2F..%2Fx%3Fa%3D1%23b%20c HTTP"
        in (answering.seen[0])
    )
    for name in ("", ".", ".."):
        with pytest.raises(ConfigError, match="cannot name a Pod"):
            cluster.delete("Pod", name)
    assert len(answering.seen) == 1


def test_a_connection_is_used_again_and_a_closed_one_is_not(api, cluster):
    """A second request needs no second connection; one that the server has closed costs nothing."""
    opened = []
    accept = api.server.get_request
    api.server.get_request = lambda: opened.append(accept()) or opened[-1]
    cluster.find("Pod")
    looked = len(opened) - 1  # the first only looks whether there is a server
    cluster.find("Pod")
    assert len(opened) == looked + 1 == 2
    opened[-1][0].shutdown(socket.SHUT_RDWR)
    time.sleep(0.2)  # until its end has come here
    cluster.find("Pod")
    assert len(opened) == 3


def test_what_may_have_been_done_is_not_asked_twice(answering):
    """The server closes the connection without an answer: a second POST could create two."""
    cluster = answering(b"", http(b'{"kind": "Pod"}'))
    with pytest.raises(ClusterError):
        cluster.create({"kind": "Pod", "metadata": {"name": "demo"}})
    assert len(answering.seen) == 1


# -- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A folder with ca, other (authorities), server and client: each a .pem and a .key."""
    folder = tmp_path_factory.mktemp("tls")
    if not shutil.which("openssl"):
        pytest.skip("needs openssl")

    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    for name in ("ca", "other"):
        openssl("req", "-x509", *new, "-keyout", f"{name}.key", "-out", f"{name}.pem",
                "-subj", f"/CN={name}")  # fmt: skip
    for name, more in (
        ("server", "subjectAltName=DNS:api.test"),
        ("client", "keyUsage=keyAgreement"),
    ):
        (folder / "more").write_text(more)
        openssl("req", *new, "-keyout", f"{name}.key", "-out", "request", "-subj", f"/CN={name}")
        openssl("x509", "-req", "-in", "request", "-CA", "ca.pem", "-CAkey", "ca.key",
                "-CAcreateserial", "-extfile", "more", "-out", f"{name}.pem")  # fmt: skip
    return folder


@pytest.fixture
def tls_api(api, certificates):
    """The API server behind TLS, which wants the client's certificate."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates / "ca.pem")
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED
    api.server.socket = context.wrap_socket(api.server.socket, server_side=True)
    return f"https://127.0.0.1:{api.server.server_port}"


def test_server_and_user_show_their_certificates(tls_api, certificates, tmp_path):
    """Files beside the kubeconfig or data in it; what is wrong with either is said."""
    import base64

    def data(name):
        return base64.b64encode((certificates / name).read_bytes()).decode()

    cluster = {"server": tls_api, "tls-server-name": "api.test"}
    authority = {"certificate-authority": str(certificates / "ca.pem")}
    keys = {"client-certificate-data": data("client.pem"), "client-key-data": data("client.key")}

    def find(*clusters, user=keys):
        merged = {key: value for part in (cluster, *clusters) for key, value in part.items()}
        return connect(None, kubeconfig(tmp_path, merged, user)).find("Pod")

    assert find(authority) == find({"insecure-skip-tls-verify": True}) == []
    for wrong, words in (
        ({"certificate-authority": str(certificates / "other.pem")}, "certificate verify failed"),
        (authority | {"tls-server-name": ""}, "certificate verify failed"),
        ({"certificate-authority-data": "%"}, "certificate-authority-data is not base64"),
        ({"certificate-authority-data": "eA=="}, "certificate-authority is no PEM"),
        ({"certificate-authority": "none.pem"}, "none.pem: No such file"),
    ):
        with pytest.raises(ClusterError, match=words):
            find(wrong)
    for user, words in (
        ({}, "cannot reach the cluster"),
        (keys | {"client-key-data": data("ca.key")}, "cannot be used: .*mismatch"),
        ({"client-certificate-data": data("client.pem")}, "go together"),
    ):
        with pytest.raises(ClusterError, match=words):
            find(authority, user=user)


# -- a proxy -------------------------------------------------------------------------------------


@pytest.fixture
def proxy(api):
    """An HTTP proxy on the way to `api`, whatever is asked for; `proxy.asked` has its requests."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(one, other):
        with contextlib.suppress(OSError):
            while data := one.recv(2**16):
                other.sendall(data)

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # the test is over
                return
            proxy.asked.append(connection.recv(2**16))
            if proxy.refuses:
                connection.sendall(
                    b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n"
                )
                continue
            other = socket.create_connection(("127.0.0.1", api.server.server_port))
            other.sendall(proxy.asked[-1].replace(b"http://api.test:81", b""))
            for pair in ((connection, other), (other, connection)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    proxy = type("Proxy", (), {"asked": [], "refuses": False})
    proxy.url = f"http://me:p%40ss@127.0.0.1:{listener.getsockname()[1]}"
    threading.Thread(target=serve, daemon=True).start()
    yield proxy
    listener.close()


def test_a_proxy_is_used_where_one_is_named(api, proxy, tmp_path, monkeypatch):
    """By proxy-url or the environment, with its password, and not for what no_proxy names."""
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    api.put({"kind": "Pod", "metadata": {"name": "demo"}})
    server = {"server": "http://api.test:81"}
    cluster = connect(None, kubeconfig(tmp_path, server | {"proxy-url": proxy.url}))
    assert cluster.get("Pod", "demo")
    assert proxy.asked[0].startswith(b"GET http://api.test:81/api/v1/")
    assert b"proxy-authorization: basic bwu6cebzcw==" in proxy.asked[0].lower()
    monkeypatch.setenv("http_proxy", proxy.url)
    assert connect(None, kubeconfig(tmp_path, server)).get("Pod", "demo")
    assert len(proxy.asked) == 2
    assert connect(None, api.kubeconfig).get("Pod", "demo") and len(proxy.asked) == 2
    proxy.refuses = True
    with pytest.raises(ClusterError, match="answered 407 Proxy Authentication Required"):
        connect(None, kubeconfig(tmp_path, server)).get("Pod", "demo")
    gone = server | {"proxy-url": "http://me:secret@127.0.0.1:1"}
    with pytest.raises(ClusterError, match=r"api.test:81 by the proxy http://127.0.0.1:1: .*refus"):
        connect(None, kubeconfig(tmp_path, gone)).get("Pod", "demo")
    monkeypatch.setenv("no_proxy", "api.test")
    with pytest.raises(ClusterError, match="cannot reach the cluster at http://api.test:81: [^p]"):
        connect(None, kubeconfig(tmp_path, server)).get("Pod", "demo")
    with pytest.raises(ClusterError, match="proxy-url is 'socks5://x:1': .* https://HOST:PORT"):
        connect(None, kubeconfig(tmp_path, server | {"proxy-url": "socks5://x:1"})).get("Pod", "d")


def test_a_server_that_is_away_costs_no_tls(tmp_path):
    """A refused connection is told without what only a connection needs."""
    path = kubeconfig(tmp_path, {"server": "https://127.0.0.1:9"})
    code = (
        "import sys; from gptddp.k8s.cli.main import cli\ntry: cli()\nfinally: print(*sys.modules)"
    )
    command = [sys.executable, "-c", code, "list", "--kubeconfig", str(path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert "https://127.0.0.1:9: Connection refused" in result.stderr
    assert not {"http.client", "ssl", "email", "kubernetes"} & {*result.stdout.split()}
