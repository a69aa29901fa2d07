"""torchrun's c10d rendezvous with the manners of a pod: `--rdzv-backend gptddp`.

The protocol and its state are torch's own (`DynamicRendezvousHandler` of torch 2.13), so agents
of both kinds can meet. What differs is how one agent behaves:

- Its identity is its address, not (address, pid): a restarted agent takes the place of its
  predecessor at once, where peers would else wait until the dead one's keep-alive runs out.
- It leaves when its agent ends. torch's *closes* the rendezvous after any error, for good and for
  everybody.
- The host's store belongs to the launcher, so it outlives the agents that fail in that process; it
  listens on the endpoint's own address where that is an IP, so that two jobs on one machine can
  use the same port.
- It looks for changes every 0.1 s, not every second, and on each look calls `check(joining)`,
  which raises to leave: for a signal, a final error, a finished run. So nothing has to be raised
  from a signal handler, and no thread has to watch.
- It compares no clock with another machine's, and none of its own that can be set: clocks may
  differ, and jump.
"""

import ipaddress
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    dynamic_rendezvous,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
)
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

BACKEND = "gptddp"
POLL_S = 0.1
PATIENCE_S, REMINDER_S = 15.0, 60.0  # of waiting in silence, before the first word and the next
SEE_OFF_S = 3.0
CONNECT_S = 2.0  # one attempt to reach the host; attempts go on until `check` raises
_PAST, _FUTURE = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
_Seen = dict[Any, tuple[datetime, float]]  # a time as it was written; when we first saw it


class Rendezvous:
    """What the agents of one launcher share: the store they host, and the way to leave."""

    def __init__(self, check: Callable[[bool], None], say: Callable[[str], None]) -> None:
        self.check, self.say = check, say
        self.next_word_s = 0.0
        self.joined = False  # has the present agent been part of a world?
        self.broken = False  # has a peer left that world, or its store gone?
        self._server: TCPStore | None = None
        self._handler: _Handler | None = None
        self._seen: _Seen = {}  # an agent that begins anew does not count anew

    def register(self) -> None:
        """Make `--rdzv-backend gptddp` known to torchrun in this process."""

        def delay(seconds: float | tuple[float, float]) -> None:
            most = seconds[1] if isinstance(seconds, tuple) else seconds
            self.pause(min(POLL_S, most))
            if self._handler is not None:
                self._waiting(f"pods: {self._handler.peers} are here")

        module: Any = dynamic_rendezvous
        module._delay = delay  # all the waiting of the joining loop
        module.datetime = _Clock()
        rendezvous_handler_registry.register(BACKEND, self._create)

    def pause(self, seconds: float) -> None:
        """Sleep while nothing calls for leaving."""
        end = time.monotonic() + seconds
        self.check(True)
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(POLL_S, left))
            self.check(True)

    def _waiting(self, what: str) -> None:
        if time.monotonic() > self.next_word_s:
            self.next_word_s = time.monotonic() + REMINDER_S
            self.say(f"waiting for {what}")

    def leave(self) -> None:
        """Give up this agent's place: its peers need not wait for its keep-alive to run out."""
        if self._handler is not None:
            self._handler.shutdown()

    def see_off(self, stopped: Callable[[], bool]) -> None:
        """At the end of the job: all agents leave, then the host exits, then the other pods.

        They would report a store that is gone. And the first pod that is seen to have exited makes
        the operator delete those that still run, with their logs: it is to be the host, whose log
        is the run's. A kubelet looks once a second.
        """
        end = time.monotonic() + SEE_OFF_S
        while self._handler is not None and time.monotonic() < end and not stopped():
            if self._server is not None:
                self._handler.look()
                if not self._handler.peers:
                    return
            time.sleep(POLL_S)

    def _create(self, params: RendezvousParameters) -> RendezvousHandler:
        self.joined, self.next_word_s = False, time.monotonic() + PATIENCE_S
        host, port = parse_rendezvous_endpoint(params.endpoint, default_port=29400)
        timeout = timedelta(seconds=params.get_as_int("read_timeout", 60) or 60)
        if params.get_as_bool("is_host", False):
            if self._server is None:
                self._server = _serve(host, port, timeout)
            port = self._server.port
        self._wait_for(host, port)
        store = TCPStore(host, port, is_master=False, timeout=timeout)

        def seconds(key: str) -> timedelta | None:
            value = params.get_as_int(f"{key}_timeout")
            return None if value is None else timedelta(seconds=value)

        timeouts = {key: seconds(key) for key in ("join", "last_call", "close", "heartbeat")}
        settings = dynamic_rendezvous.RendezvousSettings(
            params.run_id,
            params.min_nodes,
            params.max_nodes,
            dynamic_rendezvous.RendezvousTimeout(**timeouts),
            timedelta(seconds=params.get_as_int("keep_alive_interval", 5) or 5),
            params.get_as_int("keep_alive_max_attempt", 3) or 3,
        )
        backend = C10dRendezvousBackend(store, params.run_id)
        holder = _StateHolder(backend, settings, self._seen)
        # One address, one agent, whatever its process.
        me = dynamic_rendezvous._NodeDesc(params.local_addr or socket.getfqdn(), 0, 0)
        self._handler = _Handler(me, settings, BACKEND, store, holder)
        self._handler._owner = self
        return self._handler

    def _wait_for(self, host: str, port: int) -> None:
        """Wait until the host accepts; TCPStore's own waiting cannot be interrupted."""
        while True:
            self.check(True)
            try:
                socket.create_connection((host, port), timeout=CONNECT_S).close()
                return
            except OSError as error:
                time.sleep(POLL_S)
                self._waiting(f"the rendezvous at {host}:{port} ({error})")


def _serve(host: str, port: int, timeout: timedelta) -> TCPStore:
    try:
        ipaddress.ip_address(host)
    except ValueError:  # a name, which may not resolve to this pod yet: listen on every address
        return TCPStore(host, port, is_master=True, timeout=timeout, wait_for_workers=False)
    listener = socket.create_server((host, port), backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, timeout=timeout, wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )  # fmt: skip


class _Clock:
    """UTC as the system had it at the start, from then on whatever its clock is set to."""

    def __init__(self) -> None:
        self._start = datetime.now(UTC) - timedelta(seconds=time.monotonic())

    def now(self, tz: tzinfo) -> datetime:
        return (self._start + timedelta(seconds=time.monotonic())).astimezone(tz)


class _StateHolder(dynamic_rendezvous._BackendRendezvousStateHolder):
    """Judges each time in the state by how long we have seen it there, whoever has written it.

    torch compares it with the time of day: where clocks differ, a living peer is evicted, or a
    world formed before its last call is over. What is written back is what was read.
    """

    def __init__(self, backend: Any, settings: Any, seen: _Seen) -> None:
        super().__init__(backend, settings, POLL_S)  # type: ignore[arg-type]
        self._seen = seen

    def _judged(self, what: Any, written: datetime, limit: timedelta) -> datetime:
        now = time.monotonic()
        if self._seen.get(what, (None, now))[0] != written:
            self._seen[what] = written, now
        return _PAST if now - self._seen[what][1] > limit.total_seconds() else _FUTURE

    def _sanitize(self) -> None:
        state, limits = self._state, self._settings
        silence = limits.keep_alive_interval * limits.keep_alive_max_attempt
        stamps = state.last_heartbeats
        state.last_heartbeats = {it: self._judged(it, at, silence) for it, at in stamps.items()}
        super()._sanitize()
        state.last_heartbeats = {it: stamps[it] for it in state.last_heartbeats}
        if state.deadline is not None:
            state.deadline = self._judged(None, state.deadline, limits.timeout.last_call)

    def mark_dirty(self) -> None:
        super().mark_dirty()
        if self._state.deadline in (_PAST, _FUTURE):
            self._state.deadline = self._seen[None][0]


class _Handler(dynamic_rendezvous.DynamicRendezvousHandler):
    _owner: Rendezvous

    def next_rendezvous(self) -> RendezvousInfo:
        self._owner.check(True)
        self._owner.next_word_s = time.monotonic() + PATIENCE_S
        info = super().next_rendezvous()
        self._world = set(self._state_holder.state.participants)
        self._owner.joined, self._owner.broken = True, False
        return info

    def num_nodes_waiting(self) -> int:
        self._owner.check(False)
        try:
            waiting = super().num_nodes_waiting()
        except RendezvousError:
            self._owner.broken = True
            raise
        # A peer that was in this world and waits for the next has lost its worker.
        self._owner.broken = bool(self._world & self._state_holder.state.wait_list)
        return waiting

    def look(self) -> None:
        """Bring the local copy of the state up to date."""
        self._state_holder.sync()

    @property
    def peers(self) -> int:
        """How many agents are in the world, or in the one that is being formed."""
        return len(self._state_holder.state.participants)

    def shutdown(self) -> bool:
        """Leave, and do not close: the peers go on."""
        self._stop_heartbeats()
        try:
            self._op_executor.run(_leave, self._get_deadline(self._settings.timeout.heartbeat))
        except RendezvousError:
            return False  # the host is gone, and the state with it
        return True


def _leave(context: Any, deadline: float) -> Any:
    """torch's exit operation, for a place in the wait list too."""
    action = dynamic_rendezvous._Action
    if time.monotonic() > deadline:
        return action.FINISH
    if context.node in context.state.participants:
        return action.REMOVE_FROM_PARTICIPANTS
    if context.node in context.state.wait_list:
        return action.REMOVE_FROM_WAIT_LIST
    return action.FINISH
