"""The server of /metrics, and the scrape that rank 0 waits for at its end.

What was counted after the last scrape is lost to Prometheus: of a run of 23 s, scraped every 5 s,
a fifth of the steps. So the end of a life waits for one more, as long as they usually are apart.
"""

import logging
import threading
import time
from collections.abc import Callable
from socketserver import TCPServer, ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

log = logging.getLogger(__name__)

_RETRY_S = 5.0
MOST_S = 75.0  # that the last scrape is waited for; Prometheus has 60 s between two by default


class Scrapes:
    """Serves a registry from threads. A port that is taken is tried again; training never waits."""

    def __init__(self, registry: CollectorRegistry, port: int, address: str = "") -> None:
        self._registry, self._port, self._address = registry, port, address
        self._answered = threading.Condition()
        self._began: list[float] = []  # monotonic, of the last two that were answered whole
        threading.Thread(target=self._serve, name="metrics", daemon=True).start()

    def _serve(self) -> None:
        warned = False
        while True:
            try:
                server = _Server((self._address or "0.0.0.0", self._port), self._handler())
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
            server.set_app(make_wsgi_app(self._registry))
            log.info("metrics: http://%s:%d/metrics", self._address or "localhost", self._port)
            server.serve_forever()

    def _handler(self) -> type[WSGIRequestHandler]:
        scrapes = self

        class Handler(WSGIRequestHandler):
            """Says when an answer has been written, to its last byte."""

            def handle(self) -> None:
                began = time.monotonic()
                super().handle()
                if getattr(self, "path", "").startswith("/metrics"):
                    scrapes.answered(began)

            def log_message(self, *_: object) -> None:
                """Nobody wants a line for each scrape."""

        return Handler

    def answered(self, began: float) -> None:
        """A scrape that began then has got all of its answer."""
        with self._answered:
            self._began = [*self._began, began][-2:]
            self._answered.notify_all()

    def wait_for_last(self, asked: Callable[[], bool]) -> bool:
        """Wait for a scrape that begins from now on; False where none comes.

        As long as the last two were apart, and a little, or until a stop is `asked` for; not at all
        where nobody scrapes, or nobody does any more.
        """
        now = time.monotonic()
        with self._answered:
            if len(self._began) < 2:
                return False
            interval = self._began[1] - self._began[0]
            if now - self._began[1] > 2 * interval + 0.5:
                return False
            end = now + min(MOST_S, 1.2 * interval + 0.5)
            while self._began[-1] < now and time.monotonic() < end and not asked():
                self._answered.wait(0.1)
            return self._began[-1] >= now


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Without the look-up of the host's name, which may take seconds."""
        TCPServer.server_bind(self)
        host, self.server_port = self.server_address[:2]
        self.server_name = str(host)
        self.setup_environ()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away in the middle is no error of ours."""
