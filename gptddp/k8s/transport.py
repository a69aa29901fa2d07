"""HTTP to an API server: requests with their time limits, answers whole or as a stream.

The connection comes first, and what HTTP and TLS need is loaded after it: a server that is away is
told at once. Connections are kept for the next request. Nothing is asked twice, but what only reads
and has met a connection that the server had closed. Trouble is an OSError, whatever its kind.
"""

import contextlib
import json
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlencode, urlsplit

from gptddp import __version__
from gptddp.errors import ClusterError
from gptddp.k8s.credentials import Credentials, Login, pem
from gptddp.k8s.kubeconfig import Access, Entry

if TYPE_CHECKING:
    import http.client
    import ssl

_CHUNK_BYTES = 2**16
_PORTS = {"http": 80, "https": 443}


class Transport:
    """The way to one API server as one user; may be used by several threads."""

    def __init__(self, access: Access) -> None:
        """Raises ClusterError for an address that is none."""
        self._cluster, self._credentials = access.cluster, Credentials(access.user, access.cluster)
        self.server = access.cluster.text("server")
        self._url = _address(self.server, f"the {access.cluster.what}: server", tuple(_PORTS))
        self._idle: deque[_Connection] = deque()

    def __del__(self) -> None:
        for connection in self.__dict__.get("_idle", ()):
            connection.close()

    def request(
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, Any]] = (),
        body: Any = None,
        content_type: str = "application/json",
        timeouts: tuple[float, float | None] = (5.0, 30.0),
    ) -> "Answer":
        """timeouts: seconds to connect, and between two bytes. Raises OSError, ClusterError."""
        target = self._url.path.rstrip("/") + path + (f"?{urlencode(query)}" if query else "")
        data = b"" if body is None else json.dumps(body).encode()
        headers = [("User-Agent", f"gptddp-k8s/{__version__}"), ("Accept", "application/json, */*")]
        if body is not None:
            headers += [("Content-Type", content_type), ("Content-Length", str(len(data)))]
        for last in (False, True):
            login = self._credentials.login()
            own = [*headers, *self._credentials.headers(login)]
            answer = self._send(login, method.upper(), target, own, data, timeouts)
            if last or answer.status != 401 or not self._credentials.renew(login):
                break
            answer.close()
        return answer

    def _send(
        self,
        login: Login,
        method: str,
        target: str,
        headers: list[tuple[str, str]],
        data: bytes,
        timeouts: tuple[float, float | None],
    ) -> "Answer":
        connection = self._unused(login)
        while True:
            used, connection = connection is not None, connection or self._open(login, timeouts[0])
            try:
                response = connection.ask(method, target, headers, data, timeouts[1])
                return Answer(response, connection, self._idle.append)
            except BaseException as error:
                connection.close()
                if not used or method != "GET" or not isinstance(error, ConnectionError):
                    raise
                connection = None

    def _unused(self, login: Login) -> "_Connection | None":
        """One that is open and has this login's certificate."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # another thread was faster
                break
            if connection.certificate == login.certificate and connection.is_open():
                return connection
            connection.close()
        return None

    def _open(self, login: Login, timeout_s: float) -> "_Connection":
        host, port = self._url.hostname or "", self._url.port or _PORTS[self._url.scheme]
        proxy = self._proxy(host)
        at = (proxy.hostname or "", proxy.port or 80) if proxy else (host, port)
        sock = socket.create_connection(at, timeout_s)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if proxy:
                _tunnel(sock, proxy, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
            if self._url.scheme == "https":
                name = self._cluster.text("tls-server-name") or host
                sock = _context(self._cluster, login).wrap_socket(sock, server_hostname=name)
        except BaseException:
            sock.close()
            raise
        return _Connection(sock, host, port, login.certificate)

    def _proxy(self, host: str) -> SplitResult | None:
        """That of the kubeconfig, else of the environment, which has none for this machine."""
        if text := self._cluster.text("proxy-url"):
            return _address(text, f"the {self._cluster.what}: proxy-url", ("http",))
        local = host == "localhost" or host.startswith("127.") or host == "::1"
        if local or not any(name.lower().endswith("_proxy") for name in os.environ):
            return None
        from urllib import request

        text = request.getproxies_environment().get(self._url.scheme, "")
        if not text or request.proxy_bypass(host):
            return None
        text = text if "://" in text else f"http://{text}"
        return _address(text, f"the environment variable {self._url.scheme}_proxy", ("http",))


class Answer:
    """What the server says. One of `read`, `chunks` and `close` ends it."""

    def __init__(
        self,
        response: "http.client.HTTPResponse",
        connection: "_Connection",
        keep: "Callable[[_Connection], None]",
    ) -> None:
        self.status, self.reason = response.status, response.reason
        self.kind = response.getheader("Content-Type", "") or ""
        self.location = response.getheader("Location", "") or ""
        self._response, self._connection, self._keep = response, connection, keep

    def read(self) -> bytes:
        """All of it. Raises OSError."""
        try:
            with _as_os_error():
                data = self._response.read()
        except BaseException:
            self.close()
            raise
        if self._response.will_close:
            self.close()
        else:
            self._keep(self._connection)
        return data

    def chunks(self) -> Iterator[bytes]:
        """As they come. Raises OSError where the connection breaks."""
        try:
            with _as_os_error():
                while data := self._response.read1(_CHUNK_BYTES):
                    yield data
        finally:
            self.close()  # one that is left early has more to come: it cannot be used again

    def close(self) -> None:
        self._response.close()
        self._connection.close()


class _Connection:
    """One to the server, which answers one request after the other."""

    def __init__(self, sock: socket.socket, host: str, port: int, certificate: bytes) -> None:
        import http.client

        self.certificate = certificate
        self._http = http.client.HTTPConnection(host, port)
        self._http.sock, self._sock = sock, sock
        self._http.auto_open = 0

    def ask(
        self,
        method: str,
        target: str,
        headers: list[tuple[str, str]],
        data: bytes,
        timeout_s: float | None,
    ) -> "http.client.HTTPResponse":
        """Raises OSError; timeout_s: between two bytes of the answer."""
        self._sock.settimeout(timeout_s)
        with _as_os_error():
            self._http.putrequest(method, target)
            for name, value in headers:
                self._http.putheader(name, value.encode("utf-8"))
            self._http.endheaders(data or None)
            return self._http.getresponse()

    def is_open(self) -> bool:
        """Has the server not closed it meanwhile? Nothing else could be there to read."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        self._http.close()
        self._sock.close()


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Makes http.client's own errors an OSError, as all others are."""
    import http.client

    try:
        yield
    except http.client.IncompleteRead:
        raise OSError("the answer broke off") from None
    except OSError:  # one of http.client's is both
        raise
    except http.client.HTTPException as error:
        raise OSError(f"the answer is no HTTP: {error}") from None
    except ValueError as error:
        raise OSError(f"the request cannot be sent: {error}") from None


def _address(text: str, where: str, schemes: Sequence[str]) -> SplitResult:
    try:
        url = urlsplit(text)
        good = url.scheme in schemes and url.hostname and (url.port is None or url.port > 0)
    except ValueError:
        good = False
    if not good:
        begin = " or ".join(f"{scheme}://HOST:PORT" for scheme in schemes)
        raise ClusterError(f"{where} is {text!r:.100}: it must be of the form {begin}")
    return url


def _tunnel(sock: socket.socket, proxy: SplitResult, target: str) -> None:
    """Through a proxy. Raises OSError."""
    import http.client

    lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
    if proxy.username:
        import base64

        pair = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
        lines.append(f"Proxy-Authorization: Basic {base64.b64encode(pair).decode()}")
    sock.sendall("\r\n".join([*lines, "", ""]).encode())
    with _as_os_error():
        answer = http.client.HTTPResponse(sock, method="CONNECT")
        answer.begin()
    if answer.status != 200:
        raise OSError(f"the proxy {proxy.hostname} answers {answer.status} {answer.reason}")


def _context(cluster: Entry, login: Login) -> "ssl.SSLContext":
    """What TLS is to trust, and the user's certificate. Raises ClusterError, OSError."""
    import ssl

    authority = pem(cluster, "certificate-authority")
    try:
        context = ssl.create_default_context(cadata=authority.decode("utf-8") or None)
    except (ssl.SSLError, ValueError) as error:
        raise ClusterError(
            f"the {cluster.what}: certificate-authority is no PEM: {error}"
        ) from None
    # Go's TLS, and so kubectl, does not ask for what Python 3.13 asks of authorities.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    if cluster.values.get("insecure-skip-tls-verify") is True:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if login.certificate:
        _add_certificate(context, login)
    return context


def _add_certificate(context: "ssl.SSLContext", login: Login) -> None:
    """The library reads files only: they are gone a moment later, and nobody else can read them."""
    import ssl
    import tempfile

    with tempfile.TemporaryDirectory(prefix="gptddp-") as folder:
        names = [os.path.join(folder, name) for name in ("certificate", "key")]
        for name, data in zip(names, (login.certificate, login.key), strict=True):
            with open(os.open(name, os.O_WRONLY | os.O_CREAT, 0o600), "wb") as file:
                file.write(data)
        try:
            context.load_cert_chain(*names)
        except ssl.SSLError as error:
            raise ClusterError(
                f"the user's client-certificate and client-key cannot be used: {error}"
            ) from None
