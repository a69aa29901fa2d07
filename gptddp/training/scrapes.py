"""The server of /metrics, and the last scrape, which the ranks wait for.

What is counted after the last scrape is lost to Prometheus: of a run of 23 s, scraped every 5 s, a
fifth of the steps. So a run that is done waits for one more, for as long as scrapes usually are
apart.
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
MOST_S = 75.0  # that the last scrape is waited for; Prometheus has 60 s between two by default
_CONNECTIONS = 32  # at a time: each has a thread and a descriptor of the trainer's


def _bound(server: Any) -> None:
    """Of more connections the oldest goes: the port is open to strangers, who may never end one."""
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
    server.handle_error = lambda *_: None  # no stack in the log of whoever resets a connection


class Scrapes(Collector):
    """Serves a registry from threads. A port that is taken is tried again; training never waits."""

    def __init__(self, registry: CollectorRegistry, port: int, address: str = "") -> None:
        """`address`: of this machine; "": all that it has, of IPv4 and IPv6."""
        self._registry, self._port, self._address = registry, port, address
        self._newest = deque[float](maxlen=3)  # scrapes, monotonic
        self._last = self._until = 0.0  # monotonic: the last one is to begin after, and until
        self._over = threading.Event()
        registry.register(self)
        threading.Thread(target=self._serve, name="metrics", daemon=True).start()

    def collect(self) -> list[Metric]:
        """A scrape has begun; this is no family of its own."""
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
                        "metrics port %d: %s; training goes on, trying again every %g s. "
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
        """Let go of the port, in the thread that has it: other records may come to this process."""
        self._over.set()

    def expect_last(self) -> None:
        """The numbers are the last: is another scrape to come, and until when?

        As long as the last ones were apart, and a little; none if there was no second one, or if
        they have ended. Of two scrapers that come in turn the longer way between counts.
        """
        now, newest = time.monotonic(), list(self._newest)
        apart_s = max((b - a for a, b in pairwise(newest)), default=0.0)
        comes = apart_s and now - newest[-1] <= 2 * apart_s + 0.5
        self._last, self._until = now, now + min(MOST_S, 1.2 * apart_s + 0.5) * bool(comes)

    @property
    def awaited(self) -> bool:
        """Is the last scrape still to come, or to be answered?"""
        newest = max(self._newest, default=0.0)
        answered = newest + _ANSWER_S if newest > self._last else self._until
        return time.monotonic() < min(answered, self._until)
