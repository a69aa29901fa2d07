"""The server of /metrics, and the last scrape, which rank 0 waits for.

What is counted after the last scrape is lost to Prometheus: of a run of 23 s, scraped every 5 s, a
fifth of the steps. So a run that is done waits for one more scrape by each client, for as long as
its scrapes usually are apart.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from http.server import ThreadingHTTPServer
from itertools import pairwise

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import MetricsHandler

log = logging.getLogger(__name__)

_RETRY_S = 5.0
_SILENT_S = 10.0  # of a client that says nothing, or does not read
_MOST_CLIENTS = 16  # whose scrapes are remembered
MOST_S = 75.0  # that the last scrape is waited for; Prometheus has 60 s between two by default


class Scrapes:
    """Serves a registry from threads. A port that is taken is tried again; training never waits."""

    def __init__(self, registry: CollectorRegistry, port: int, address: str = "") -> None:
        """`address`: of this machine; "": all that it has, of IPv4 and IPv6."""
        self._registry, self._port, self._address = registry, port, address
        self._answered = threading.Condition()
        # by client, monotonic: when its newest scrapes began that it has read to their end
        self._began: dict[str, list[float]] = {}
        threading.Thread(target=self._serve, name="metrics", daemon=True).start()

    def _serve(self) -> None:
        warned = False
        while True:
            try:
                server = self._listen()
            except OSError as error:
                if not warned:
                    log.warning(
                        "metrics port %d: %s; training goes on, trying again every %g s. "
                        "Choose another with --metrics-port.",
                        self._port,
                        error.strerror,
                        _RETRY_S,
                    )
                warned = True
                time.sleep(_RETRY_S)
                continue
            log.info("metrics: http://%s:%d/metrics", self._address or "localhost", self._port)
            server.serve_forever()

    def _listen(self) -> ThreadingHTTPServer:
        """Raises OSError."""
        server = _Server(("", 0), self._handler(), bind_and_activate=False)
        server.socket.close()
        if not self._address and socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # IPv6 may be there and of no use
                server.socket = socket.create_server(
                    ("", self._port), family=socket.AF_INET6, dualstack_ipv6=True
                )
                return server
        server.socket = socket.create_server((self._address, self._port))
        return server

    def _handler(self) -> type[MetricsHandler]:
        scrapes = self

        class Handler(MetricsHandler):
            """Says when a client has read an answer to its end."""

            timeout = _SILENT_S
            registry = self._registry

            def do_GET(self) -> None:
                began = time.monotonic()
                super().do_GET()
                self.connection.shutdown(socket.SHUT_WR)
                # one that leaves before it has read all resets the connection: an error here
                if not self.rfile.read(1) and self.path.startswith("/metrics"):
                    scrapes.answered(began, self.client_address[0])

        return Handler

    def answered(self, began: float, client: str) -> None:
        """A client has read all of the answer to a scrape that began then."""
        with self._answered:
            newest = [*self._began.pop(client, []), began][-3:]
            others = list(self._began.items())[1 - _MOST_CLIENTS :]
            self._began = {**dict(others), client: newest}
            self._answered.notify_all()

    def wait_for_last(self, asked: Callable[[], bool]) -> bool:
        """Wait for a scrape by every client that begins from now on; False where one is missing.

        A client is waited for as long as its last scrapes were apart, and a little, or until a stop
        is `asked` for; not at all if it scraped less than twice, or has stopped to.
        """
        now = time.monotonic()
        with self._answered:
            waits = {
                client: now + min(MOST_S, 1.2 * apart_s + 0.5)
                for client, began in self._began.items()
                # two behind one address come in turn: the longer way between them is an interval
                if (apart_s := max((b - a for a, b in pairwise(began)), default=0.0))
                and now - began[-1] <= 2 * apart_s + 0.5
            }
            missing = set(waits)
            while missing and not asked():
                missing = {it for it in missing if self._began.get(it, [now])[-1] < now}
                if not any(time.monotonic() < waits[it] for it in missing):
                    break
                self._answered.wait(0.1)
            return bool(waits) and not missing


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away in the middle is no error of ours."""
