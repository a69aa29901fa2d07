"""Connections to a cluster by TLS and by proxies, and a missing package."""

import base64
import shutil
import socket
import ssl
import subprocess
import sys
import threading

import pytest
from support.api_server import HeaderAPI, kubeconfig, named

from gptddp.k8s.cluster import connect
from gptddp.k8s.exit_codes import ClusterError


@pytest.fixture
def server_in():
    return HeaderAPI


@pytest.fixture
def tls_api(api, tmp_path):
    """The API server with TLS, and a certificate like EKS's, without a key identifier."""
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
    """The kubeconfig's authority must have signed it; Python 3.13's stricter flag is not used."""
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
        with pytest.raises(
            ClusterError,
            match="cannot reach .*certificate verify failed.*; does the kubeconfig",
        ):
            find(**wrong)
    assert capsys.readouterr().err == ""


def test_a_key_of_the_kubeconfig_does_not_stay_on_disk(tls_api, api, tmp_path, monkeypatch):
    """The package writes it to a file, which is removed before any request can be interrupted."""
    required = api.server.socket.context
    required.load_verify_locations(tmp_path / "ca.pem")
    required.verify_mode = ssl.CERT_REQUIRED
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))

    def data(name):
        return base64.b64encode((tmp_path / name).read_bytes()).decode()

    user = {"client-certificate-data": data("own.pem"), "client-key-data": data("own.key")}
    server = tls_api | {"certificate-authority-data": data("ca.pem")}
    path = kubeconfig(tmp_path / "config", server, users=named("u", user=user))
    for _ in range(2):
        cluster = connect(None, path)
        assert list((tmp_path / "scratch").iterdir()) == []
        assert cluster.find("Pod") == []
    user["client-key-data"] = data("other.key")
    kubeconfig(path, server, users=named("u", user=user))
    with pytest.raises(ClusterError, match="config cannot be used .*key values mismatch"):
        connect(None, path)


@pytest.fixture
def proxy(api):
    """An HTTP proxy that sends every request to `api`; `proxy.asked` has its requests."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # the test has ended
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
    """A proxy may have a password; the environment's is not used for local addresses."""
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
    monkeypatch.setenv("http_proxy", proxy.url.removeprefix("http://"))
    assert find("http://api.test:81") == []
    with pytest.raises(ClusterError, match="; is this proxy, of HTTPS_PROXY or"):
        find("https://api.test:81", **{"proxy-url": "http://127.0.0.1:9"})


def test_a_missing_package_is_named(tmp_path):
    """Exit code 2 with the command that installs it, and no traceback."""
    code = (
        "import sys; sys.modules['kubernetes'] = None\nfrom gptddp.k8s.cli.main import cli; cli()"
    )
    path = kubeconfig(tmp_path / "config")
    command = [sys.executable, "-c", code, "list", "--kubeconfig", str(path)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "needs the package kubernetes: pip install 'gptddp[k8s]'" in result.stderr
