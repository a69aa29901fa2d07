"""The server of /metrics, and the last scrape, which the ranks wait for.

Prometheus loses counts after the last scrape: a fifth of the steps of a run of 23 s that is scraped
every 5 s. So a finished run waits for one more scrape, about as long as the usual interval.
"""

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from itertools import pairwise
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector

log = logging.getLogger(__name__)

_RETRY_S = 5.0
_ANSWER_S = 0.5  # until an answer is sent
MOST_S = 75.0  # limit of the wait for the last scrape; Prometheus' default interval is 60 s
_CONNECTIONS = 32  # at a time: each takes a thread and a descriptor of the trainer


def _bound(server: Any) -> None:
    """Close the oldest of too many connections: strangers may open some and never close them."""
    there, changing, end = dict[socket.socket, None](), threading.Lock(), server.shutdown_request

    def begin(request: socket.socket, address: Any) -> bool:
        with changing:
            there[request] = None
            if len(there) > _CONNECTIONS:
                oldest = next(iter(there))
                del there[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        return True

    def over(request: socket.socket) -> None:
        with changing:
            there.pop(request, None)
            end(request)

    server.verify_request, server.shutdown_request = begin, over
    server.handle_error = lambda *_: None  # no traceback in the log for a reset connection
    # wsgiref's 5 make a scrape wait for seconds while a stranger opens connections
    server.socket.listen(4 * _CONNECTIONS)


class Scrapes(Collector):
    """Serves a registry from threads. Retries a port that is in use; training never waits."""

    def __init__(self, registry: CollectorRegistry, port: int, address: str = "") -> None:
        """`address`: of this machine; "": all its IPv4 and IPv6 addresses."""
        self._registry, self._port, self._address = registry, port, address
        self._newest = deque[float](maxlen=3)  # scrapes, monotonic
        self._last = self._until = 0.0  # monotonic: limits for the start of the last scrape
        self._over = threading.Event()
        registry.register(self)
        threading.Thread(target=self._serve, name="metrics", daemon=True).start()

    def collect(self) -> list[Metric]:
        """Note that a scrape has begun; adds no metric."""
        self._newest.append(time.monotonic())
        return []

    def _serve(self) -> None:
        warned = False
        while not self._over.is_set():
            try:
                server = self._listen()
            except OSError as error:
                if not warned:
                    log.warning(
                        "metrics port %d: %s; training continues and retries every %g s. "
                        "Choose another with --metrics-port.",
                        self._port,
                        error.strerror,
                        _RETRY_S,
                    )
                warned = True
                self._over.wait(_RETRY_S)
                continue
            log.info("metrics: http://%s:%d/metrics", self._address or "localhost", self._port)
            self._over.wait()
            server.shutdown()
            server.server_close()

    def _listen(self) -> WSGIServer:
        """Raises OSError."""
        try:
            server, _ = start_http_server(self._port, self._address or "::", self._registry)
        except OSError:
            if self._address:
                raise
            # without IPv6
            server, _ = start_http_server(self._port, "0.0.0.0", self._registry)
        _bound(server)
        return server

    def close(self) -> None:
        """Free the port, in the thread that holds it: this process may get another recorder."""
        self._over.set()

    def expect_last(self) -> None:
        """The numbers are final: set how long to wait for another scrape.

        The wait is the last interval and a little more; zero without a second scrape, or if scrapes
        have stopped. With two scrapers in turn the longer interval counts.
        """
        now, newest = time.monotonic(), list(self._newest)
        apart_s = max((b - a for a, b in pairwise(newest)), default=0.0)
        comes = apart_s and now - newest[-1] <= 2 * apart_s + 0.5
        self._last, self._until = now, now + min(MOST_S, 1.2 * apart_s + 0.5) * bool(comes)

    @property
    def awaited(self) -> bool:
        """Is the last scrape still expected, or its answer not yet sent?"""
        newest = max(self._newest, default=0.0)
        answered = newest + _ANSWER_S if newest > self._last else self._until
        return time.monotonic() < min(answered, self._until)
