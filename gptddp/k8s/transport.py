"""HTTP to an API server, by the package `kubernetes`, which this module alone loads.

A server that is away is told before that: the package takes thirty times as long to load as it
takes to find that out. Kubeconfig and login are ours (`kubeconfig`, `credentials`): the package
goes on as nobody where a login fails. Trouble on the way is an OSError, whatever its kind.
"""

import contextlib
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, unquote, urlencode, urlsplit

from gptddp import __version__
from gptddp.errors import ClusterError, GptddpError
from gptddp.k8s.credentials import Credentials, Login, pem
from gptddp.k8s.kubeconfig import Access, Entry

if TYPE_CHECKING:
    import ssl

_CHUNK_BYTES = 2**16
_PORTS = {"http": 80, "https": 443}
_AT_ONCE = 256  # connections that are kept: a log of each pod


class Transport:
    """The way to one API server as one user; may be used by several threads."""

    def __init__(self, access: Access) -> None:
        """Raises ClusterError for an address that is none."""
        self._cluster, self._credentials = access.cluster, Credentials(access.user, access.cluster)
        self.server = access.cluster.text("server")
        self._url = _address(self.server, f"the {access.cluster.what}: server", tuple(_PORTS))
        self._lock = threading.Lock()
        self._client: tuple[bytes, Any] | None = None  # the certificate that it shows, and itself
        self.by = ""  # " by the proxy ..." once one is known to be between, for messages

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
        target = self.server.rstrip("/") + path + (f"?{urlencode(query)}" if query else "")
        for last in (False, True):
            login = self._credentials.login()
            client = self._client_for(login, timeouts[0])
            headers = self._headers(login, content_type)
            with _as_os_error():
                answer = Answer(
                    client.request(
                        method, target, headers=headers, body=body, _request_timeout=timeouts
                    ).response
                )
            if last or answer.status != 401 or not self._credentials.renew(login):
                break
            answer.close()
        return answer

    def _headers(self, login: Login, content_type: str) -> Any:
        from urllib3 import HTTPHeaderDict

        found = HTTPHeaderDict({"User-Agent": f"gptddp-k8s/{__version__}"})
        found["Accept"], found["Content-Type"] = "application/json, */*", content_type
        for name, value in self._credentials.headers(login):
            found.add(name, value)  # of some, such as Impersonate-Group, there are several
        return found

    def _client_for(self, login: Login, timeout_s: float) -> Any:
        """A client that shows this login's certificate; its connections are used again."""
        with self._lock:
            if self._client is None or self._client[0] != login.certificate:
                proxy = self._proxy(self._url.hostname or "")
                if proxy:
                    self.by = f" by the proxy {proxy.scheme}://{proxy.netloc.rpartition('@')[2]}"
                else:
                    port = self._url.port or _PORTS[self._url.scheme]
                    socket.create_connection((self._url.hostname, port), timeout_s).close()
                self._client = login.certificate, self._new_client(login, proxy)
            return self._client[1]

    def _new_client(self, login: Login, proxy: SplitResult | None) -> Any:
        try:
            import urllib3
            from kubernetes.client.configuration import Configuration
            from kubernetes.client.rest import RESTClientObject
        except ModuleNotFoundError as error:
            raise GptddpError(
                f"talking to a cluster needs the package {error.name}: pip install 'gptddp[k8s]'"
            ) from None
        settings = Configuration(host=self.server, proxy="", no_proxy="")  # "": not the package's
        settings.retries = False  # the message comes at once, and what creates is not asked twice
        settings.connection_pool_maxsize = _AT_ONCE
        settings.keep_alive = True
        settings.tls_server_name = self._cluster.text("tls-server-name") or None
        settings.verify_ssl = self._cluster.values.get("insecure-skip-tls-verify") is not True
        if not settings.verify_ssl:  # as the kubeconfig says
            urllib3.disable_warnings(urllib3.exceptions.InsecureRequestWarning)
        if proxy:
            settings.proxy = f"{proxy.scheme}://{proxy.netloc.rpartition('@')[2]}"
            pair = f"{unquote(proxy.username or '')}:{unquote(proxy.password or '')}"
            who = pair if proxy.username else None
            settings.proxy_headers = urllib3.make_headers(proxy_basic_auth=who)
        client = RESTClientObject(settings)
        if self._url.scheme == "https":
            # the package would take the certificates as files, which it leaves in /tmp
            context = _context(self._cluster, login)
            client.pool_manager.connection_pool_kw["ssl_context"] = context
        return client

    def _proxy(self, host: str) -> SplitResult | None:
        """That of the kubeconfig, else of the environment, which has none for this machine."""
        if text := self._cluster.text("proxy-url"):
            return _address(text, f"the {self._cluster.what}: proxy-url", tuple(_PORTS))
        local = host == "localhost" or host.startswith("127.") or host == "::1"
        if local or not any(name.lower().endswith("_proxy") for name in os.environ):
            return None
        from urllib import request

        text = request.getproxies_environment().get(self._url.scheme, "")
        if not text or request.proxy_bypass(host):
            return None
        text = text if "://" in text else f"http://{text}"
        return _address(text, f"the environment variable {self._url.scheme}_proxy", tuple(_PORTS))


class Answer:
    """What the server says. One of `read`, `chunks` and `close` ends it."""

    def __init__(self, response: Any) -> None:
        self.status, self.reason = int(response.status), str(response.reason or "")
        self.kind = str(response.headers.get("Content-Type") or "")
        self.location = str(response.headers.get("Location") or "")
        self._response = response  # of urllib3

    def read(self) -> bytes:
        """All of it. Raises OSError."""
        with _as_os_error():
            return bytes(self._response.read())

    def chunks(self) -> Iterator[bytes]:
        """As they come. Raises OSError where the connection breaks."""
        try:
            with _as_os_error():
                yield from self._response.stream(_CHUNK_BYTES, decode_content=False)
        finally:
            self.close()  # one that is left early has more to come: it cannot be used again

    def close(self) -> None:
        self._response.close()


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    """Makes errors of the package, and of those that it uses, an OSError with their cause."""
    import http.client

    from kubernetes.client import ApiException
    from urllib3 import exceptions

    try:
        yield
    except OSError:
        raise
    except ApiException as error:  # the package's own, of TLS
        raise OSError(str(error.reason).rpartition("\n")[2]) from None
    except (exceptions.HTTPError, http.client.HTTPException, ValueError) as error:
        cause: Any = error
        while isinstance(cause, exceptions.HTTPError) and cause.args:
            if not isinstance(cause.args[-1], Exception):
                break
            cause = cause.args[-1]
        if isinstance(cause, exceptions.IncompleteRead | http.client.IncompleteRead):
            raise OSError("the answer broke off") from None
        if isinstance(cause, OSError):  # one of http.client's is both
            raise OSError(cause.strerror or str(cause)) from None
        if isinstance(cause, http.client.HTTPException):
            raise OSError(f"the answer is no HTTP: {cause}") from None
        raise OSError(str(cause).rpartition("): ")[2]) from None  # without the pool's description


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
