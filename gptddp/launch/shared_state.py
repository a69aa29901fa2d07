"""An agent's copy of the rendezvous' state, which it reads from the host's store and writes there.

Three kinds of keys, so that the host sends little however many agents there are:

- the state: signed JSON (`signing.py`, `state.py`). It changes when an agent comes or goes.
- `.change`: a few random bytes, new after each write of the state. This is what is polled.
- `.beat.<agent>`: a few random bytes, new at each sign of life. Up to WATCHERS agents watch all
  others, and the others watch those.

What does not verify is never used, and neither is a state that is older than ours: we put the
newest that we know back in its place. As long as somebody writes such things no world forms that is
smaller than it may be, for they may be the pods of a second group, with another key.
"""

import os
import time
import zlib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousSettings

from gptddp.distributed import torch_private_elastic
from gptddp.distributed.torch_private_elastic import RendezvousState
from gptddp.launch.signing import Signer
from gptddp.launch.state import decode, encode, nodes_of

POLL_S, MOST_POLLS = 0.1, 2560  # the polls of all agents together, a second
READ_S, MOST_READS = 1.0, 50  # of the whole state, changed or not; of all agents together, a second
WATCHERS = 16
MOST_LOOKS = 256  # at the beats; of all agents together, a second
MOST_TAKEN = 1 << 61  # of a number in another's state: we count on from it
HELD_S = 2.0  # after a state that does not verify, until a smaller world may form
ABSENT = b"-"  # a key that holds nothing; reading one that is missing would block
_PAST, _FUTURE = datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)
Seen = dict[Any, tuple[Any, float]]  # what was written; when (monotonic) we first saw it


class SharedState(torch_private_elastic.StateHolder):
    """What torch asks for the state: `sync` brings `state` up to date, or writes what is dirty.

    Each time is judged by how long we have seen it there, whoever has written it: torch compares
    it with the time of day, and where clocks differ, a living peer would be evicted, or a world
    formed before its last call is over. What is written back is what was read.
    """

    def __init__(
        self,
        store: Store,
        settings: RendezvousSettings,
        address: str,
        signer: Signer,
        seen: Seen,
        warn: Callable[[str], None],
    ) -> None:
        """`seen` outlives this agent; `warn` is given a line for the log, as often as it may be."""
        self._store, self._settings, self._signer = store, settings, signer
        self._me = torch_private_elastic.Node(address, 0, 0)
        self._seen, self._warn = seen, warn
        self._key = f"torch.rendezvous.{settings.run_id}"  # where an older version fails, as it may
        self._state = RendezvousState()
        self._text, self._seq = "", 0  # the newest state that we know; "": there has been none
        self._ours = ABSENT  # the value in which it came
        self._found = ABSENT  # what the store has, as far as we know
        self._beat_of: datetime | None = None  # our newest sign of life, as torch counts it
        self._change, self._dirty = b"", False
        self._poll_at = self._read_at = self._watch_at = 0.0  # monotonic
        self._forged_s = -HELD_S  # monotonic: when we last saw what does not verify

    @property
    def state(self) -> RendezvousState:
        """The local copy, which torch's operations change before they call `mark_dirty`."""
        return self._state

    def mark_dirty(self) -> None:
        self._dirty = True

    def sync(self) -> bool | None:
        """Read what has changed, or write; has the write succeeded? Raises RendezvousError."""
        now, written = time.monotonic(), None
        if self._dirty:
            written = self._write()
        elif now < self._poll_at:
            return None
        else:
            self._poll(now)
        self._dirty = False
        agents = len(nodes_of(self._state))
        self._poll_at = time.monotonic() + max(POLL_S, agents / MOST_POLLS)
        self._state = decode(self._text)[0] if self._text else RendezvousState()
        self._add_times()
        self._remove_silent()
        return written

    # -- the state ---------------------------------------------------------------------------------

    def _poll(self, now: float) -> None:
        change = self._read(f"{self._key}.change")
        if change == self._change and now < self._read_at:
            return
        self._take(self._read(self._key))
        self._change = change  # read before the state: what changes in between is read again
        self._read_at = now + max(READ_S, len(nodes_of(self._state)) / MOST_READS)

    def _take(self, found: bytes) -> None:
        """Take what the store has, or put ours back where it is not valid or is older."""
        self._found = found
        text = self._signer.read(self._key, found)
        try:
            seq = decode(text, MOST_TAKEN)[1] if text is not None else -1
        except ValueError:
            seq = -1
        if text is not None and seq >= self._seq:
            self._text, self._seq, self._ours = text, seq, found
        elif found != ABSENT or self._text:
            self._forged_s = time.monotonic()
            self._warn(self._complaint(found))
            # Who knows no state writes over this one as if there were none.
            if self._text and self._swap(found, self._ours) == self._ours:
                self._found = self._ours

    def _write(self) -> bool:
        """Write our copy over the state that it was made of, if that is still there."""
        self._beat()
        deadline = self._state.deadline
        if deadline in (_PAST, _FUTURE):
            deadline = self._seen[None][0]
        if encode(self._state, self._seq, deadline) == self._text:
            return True  # only the sign of life was new
        text = encode(self._state, self._seq + 1, deadline)
        value = self._signer.sign(self._key, text).encode()
        found = self._swap(self._found, value)
        if found != value:
            if found == self._found:  # which is also the answer where the key has been deleted
                found = self._read(self._key)
            self._take(found)
            return False
        self._text, self._seq, self._ours, self._found = text, self._seq + 1, value, value
        return True

    def _complaint(self, found: bytes) -> str:
        whose = "with this job's key" if self._signer.has_key else "of this job"
        text = f"the state of the rendezvous was replaced or deleted, and not by a pod {whose}"
        if not self._signer.has_key and found[64:66] == b" {":
            text = "the state of the rendezvous is signed, and this pod has no key"
        return (
            f"{text}: what is there is ignored. Restart the pods that were started without the "
            "Secret, or with an older one; if there are none, somebody else reaches the port: see "
            "docs/security.md of the sources. This is said once"
        )

    # -- signs of life -----------------------------------------------------------------------------

    def _add_times(self) -> None:
        """Give the copy the times that torch looks for: our last sign of life, and the deadline."""
        state, now = self._state, time.monotonic()
        state.last_heartbeats = dict.fromkeys(nodes_of(state), _FUTURE)
        if self._me in state.last_heartbeats:
            state.last_heartbeats[self._me] = self._beat_of or _PAST
        if state.deadline is not None:
            over = self._for_longer(None, state.deadline, self._settings.timeout.last_call)
            held = now - self._forged_s < HELD_S
            state.deadline = _PAST if over and not held else _FUTURE

    def _beat(self) -> None:
        """Write a sign of life, if there is a new one."""
        newest = self._state.last_heartbeats.get(self._me)
        if newest not in (None, _PAST, self._beat_of):
            self._call("set", self._beat_key(self._me), os.urandom(6).hex())
            self._beat_of = newest

    def _remove_silent(self) -> None:
        """Take agents that were silent for too long out of our copy; it is written later."""
        order = sorted(nodes_of(self._state), key=lambda n: (zlib.crc32(n.addr.encode()), n))
        watchers = order[:WATCHERS]
        watched = order if self._me in watchers or self._me not in order else watchers
        if time.monotonic() > self._watch_at:
            self._watch_at = time.monotonic() + max(POLL_S, len(order) / MOST_LOOKS)
            silent = self._silent(watched)
        else:
            known = [node for node in watched if node in self._seen]
            silent = [node for node in known if self._is_over(node, self._seen[node][0])]
            silent = self._silent(silent)  # one that has come back must not be taken out again
        torch_private_elastic.remove_nodes(self._state, silent, self._settings)

    def _silent(self, nodes: list[Any]) -> list[Any]:
        """The agents whose newest sign of life is too old."""
        return [node for node, beat in self._read_beats(nodes).items() if self._is_over(node, beat)]

    def _is_over(self, node: Any, beat: bytes) -> bool:
        limits = self._settings
        return self._for_longer(
            node, beat, limits.keep_alive_interval * limits.keep_alive_max_attempt
        )

    def _read_beats(self, nodes: list[Any]) -> dict[Any, bytes]:
        keys = [self._beat_key(node) for node in nodes]
        if keys and not self._call("check", keys):  # a key that is missing would block multi_get
            return {n: self._read(key) for n, key in zip(nodes, keys, strict=True)}
        values = self._call("multi_get", keys) if keys else []
        return dict(zip(nodes, values, strict=True))

    def _for_longer(self, key: Any, written: Any, limit: timedelta) -> bool:
        """Have we seen this very value under this key for longer than the limit?"""
        now = time.monotonic()
        if self._seen.get(key, (None, now))[0] != written:
            self._seen[key] = written, now
        return now - self._seen[key][1] > limit.total_seconds()

    def _beat_key(self, node: Any) -> str:
        return f"{self._key}.beat.{node.addr}"

    # -- the store ---------------------------------------------------------------------------------

    def _read(self, key: str) -> bytes:
        """The value of a key, which is made where it is missing: a mere `get` would wait for it."""
        value: bytes = self._call("compare_set", key, "", ABSENT)
        return value

    def _swap(self, old: bytes, new: bytes) -> bytes:
        """Replace the state if it is still the old one; what is there now."""
        value: bytes = self._call("compare_set", self._key, old, new)
        if value == new:
            self._call("set", f"{self._key}.change", os.urandom(6).hex())
        return value

    def _call(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self._store, method)(*args)
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError(f"the store does not answer: {error}") from error
