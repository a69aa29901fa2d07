"""torchrun's c10d rendezvous as pods need it: `--rdzv-backend gptddp`.

The protocol is torch's own (`DynamicRendezvousHandler` of torch 2.15); its state is our own signed
JSON, so agents of torch's c10d backend cannot take part. What differs in how one agent behaves:

- Its identity is its address, not (address, pid): a restarted agent replaces its predecessor at
  once, where peers would else wait until the dead one's keep-alive runs out.
- It leaves when its agent ends. torch's *closes* the rendezvous after any error, for good and for
  everybody.
- The host's store belongs to the launcher, so it outlives the agents that fail in that process; it
  listens on the endpoint's own address where that is an IP, so that two jobs on one machine can
  use the same port.
- It asks for changes every 0.1 s, not every second, and calls `raise_if_over(joining)` each time,
  which raises to leave: for a signal, a final error, a finished run. So nothing has to be raised
  from a signal handler, and no thread has to watch.
- It unpickles nothing, and uses nothing from the store that was not signed with the job's key.
- It deletes the keys of past rounds.
- It does not compare times of different machines, nor use a clock of its own that can be set:
  clocks may differ, and jump.
"""

import ipaddress
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousSettings,
    RendezvousTimeout,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from gptddp.distributed import torch_private_elastic
from gptddp.launch.shared_state import POLL_S, Seen, SharedState
from gptddp.launch.signing import SignedStore, Signer

BACKEND = "gptddp"
FIRST_REPORT_S, REPORT_EVERY_S = 15.0, 60.0  # of waiting, until the log says for what, and again
HOST_S = 3600.0  # a host that is stopped is no reason to lose what its peers have in memory
PEERS_EXIT_S = 3.0  # for the peers to leave at the end of the job
CONNECT_S = 2.0  # one attempt to reach the host; attempts go on until `raise_if_over` does
KEPT_ROUNDS = 8  # of which the store keeps the keys, for agents that are late


class Rendezvous:
    """What the agents of one launcher share: the store that they host, and how they leave."""

    def __init__(
        self,
        raise_if_over: Callable[[bool], None],
        say: Callable[[str], None],
        key: str = "",
        say_alive: Callable[[float], None] = lambda busy_s: None,
    ) -> None:
        """`key`: the job's, with which its pods sign what they write; empty: they cannot.

        `say_alive` is told how long the host may be silent: torch waits for one that is stopped, or
        whose node is, until the connection breaks.
        """
        self.raise_if_over, self.say, self.say_alive = raise_if_over, say, say_alive
        self._key = key
        self._warned = False  # that the store has what does not verify
        self.next_report_s = 0.0  # monotonic: when the log says what is waited for
        self.joined = False  # has the present agent been part of a world?
        self.broken = False  # has a peer left that world, or its store gone?
        self._server: TCPStore | None = None
        self._handler: _Handler | None = None
        self._seen: Seen = {}  # an agent that begins anew does not count anew

    def register(self) -> None:
        """Make `--rdzv-backend gptddp` known to torchrun in this process."""

        def delay(seconds: float | tuple[float, float]) -> None:
            most = seconds[1] if isinstance(seconds, tuple) else seconds
            self.pause(min(POLL_S, most))
            if self._handler is not None:
                self._report_waiting(f"pods: {self._handler.agents} are here")
            self.say_alive(HOST_S)  # the next attempt asks the host

        torch_private_elastic.install_waiting(delay, _Clock())
        rendezvous_handler_registry.register(BACKEND, self._create)

    def pause(self, seconds: float) -> None:
        """Sleep; raises as soon as `raise_if_over` does."""
        end = time.monotonic() + seconds
        self.raise_if_over(True)
        while (rest_s := end - time.monotonic()) > 0:
            time.sleep(min(POLL_S, rest_s))
            self.raise_if_over(True)

    def _report_waiting(self, what: str) -> None:
        if time.monotonic() > self.next_report_s:
            self.next_report_s = time.monotonic() + REPORT_EVERY_S
            self.say(f"waiting for {what}")

    def withdraw(self) -> None:
        """Take this agent out: its peers need not wait for its keep-alive to run out."""
        if self._handler is not None:
            self._handler.shutdown()

    def wait_for_exits(self, stopped: Callable[[], bool]) -> None:
        """At the end of the job: all agents leave, then the host's pod exits, then the others.

        The host returns when all agents have left, as they would report a store that is gone. The
        other pods wait for PEERS_EXIT_S: the first pod that is seen to have exited makes the
        operator delete those that still run, with their logs, and that is to be the host, whose log
        is the run's. A kubelet polls once a second.
        """
        end = time.monotonic() + PEERS_EXIT_S
        while self._handler is not None and time.monotonic() < end and not stopped():
            if self._server is not None:
                self._handler.refresh()
                if not self._handler.agents:
                    return
            time.sleep(POLL_S)

    def _create(self, params: RendezvousParameters) -> RendezvousHandler:
        """Make an agent's handler, once its host can be reached: torchrun calls this."""
        self.joined, self.next_report_s = False, time.monotonic() + FIRST_REPORT_S
        host, port = parse_rendezvous_endpoint(params.endpoint, default_port=29400)
        timeout = timedelta(seconds=params.get_as_int("read_timeout", 60) or 60)
        if params.get_as_bool("is_host", False):
            if self._server is None:
                self._server = _serve(host, port, timeout)
            port = self._server.port
        self._wait_for(host, port)
        store = TCPStore(host, port, is_master=False, timeout=timeout)
        settings = _settings(params)
        signer = Signer(self._key, params.run_id)
        address = params.local_addr or socket.getfqdn()
        holder = SharedState(store, settings, address, signer, self._seen, self._warn)
        self._handler = _Handler(self, signer, address, settings, BACKEND, store, holder)
        return self._handler

    def _warn(self, line: str) -> None:
        if not self._warned:
            self._warned = True
            self.say(f"warning: {line}")

    def _wait_for(self, host: str, port: int) -> None:
        """Wait until the host accepts; TCPStore's own waiting cannot be interrupted."""
        while True:
            self.raise_if_over(True)
            try:
                socket.create_connection((host, port), timeout=CONNECT_S).close()
                return
            except OSError as error:
                time.sleep(POLL_S)
                self._report_waiting(f"the rendezvous at {host}:{port} ({error})")


def _settings(params: RendezvousParameters) -> RendezvousSettings:
    """torch's settings, from the values of `--rdzv-conf`."""

    def seconds(key: str) -> timedelta | None:
        value = params.get_as_int(f"{key}_timeout")
        return None if value is None else timedelta(seconds=value)

    timeouts = {key: seconds(key) for key in ("join", "last_call", "close", "heartbeat")}
    return RendezvousSettings(
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        RendezvousTimeout(**timeouts),
        timedelta(seconds=params.get_as_int("keep_alive_interval", 5) or 5),
        params.get_as_int("keep_alive_max_attempt", 3) or 3,
    )


def _serve(host: str, port: int, timeout: timedelta) -> TCPStore:
    """The host's store, at the endpoint."""
    try:
        ipaddress.ip_address(host)
    except ValueError:  # a name, which may not resolve to this pod yet: listen on every address
        return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False)
    listener = socket.create_server((host, port), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


class _Clock:
    """UTC as the system had it at first; it goes on evenly when the system's clock is set."""

    def __init__(self) -> None:
        self._start = datetime.now(UTC) - timedelta(seconds=time.monotonic())

    def now(self, tz: tzinfo) -> datetime:
        return (self._start + timedelta(seconds=time.monotonic())).astimezone(tz)


class _Handler(torch_private_elastic.Handler):
    """One agent's handler; it reports to its Rendezvous."""

    def __init__(self, owner: Rendezvous, signer: Signer, *args: Any) -> None:
        super().__init__(*args)
        self._owner, self._signer = owner, signer
        self._world: set[Any] = set()  # the agents of the present world

    def next_rendezvous(self) -> RendezvousInfo:
        self._owner.raise_if_over(True)
        self._owner.next_report_s = time.monotonic() + FIRST_REPORT_S
        self._owner.say_alive(HOST_S)
        info = super().next_rendezvous()
        self._world = set(self.holder.state.participants)
        self._owner.joined, self._owner.broken = True, False
        if info.rank == 0:
            self.forget_round(self.holder.state.round - KEPT_ROUNDS)
        return info

    def round_store(self, prefix: str, store: Store) -> Store:
        return SignedStore(prefix, store, self._signer)

    def num_nodes_waiting(self) -> int:
        self._owner.raise_if_over(False)
        self._owner.say_alive(HOST_S)
        try:
            waiting = super().num_nodes_waiting()
        except RendezvousError:
            self._owner.broken = True
            raise
        self._owner.say_alive(0.0)
        # A peer that was in this world and waits for the next has lost its worker.
        self._owner.broken = bool(self._world & self.holder.state.wait_list)
        return waiting

    def refresh(self) -> None:
        """Bring the local copy of the state up to date."""
        self.holder.sync()

    @property
    def agents(self) -> int:
        """How many agents are in the world, or in the one that is being formed."""
        return len(self.holder.state.participants)

    def shutdown(self) -> bool:
        """Leave, and do not close: the peers go on. False where the host is gone."""
        try:
            self.withdraw()
        except RendezvousError:
            return False  # and the state is gone with the host
        return True
