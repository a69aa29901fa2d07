"""One job at a time has a run: `lease.json` in the run directory, which its holder keeps touching.

It names the job, the life and the process that hold the run. A life that follows the holder's takes
it over at once: it knows that one to be over, as a majority says. So does any process that sees
that the holder is dead, which one of the same machine and process namespace can. All others poll
the file: while its time of change moves, a job of another name is refused, and one of the same name
waits; when it has stood still for EXPIRY_S, by the poller's own clock, it is taken over. No clock
is compared with another machine's, no lock of the file system is used, and touching needs no space
on a full disk: it works on NFS.

A holder that was only silent may come back, so a holder reads the lease again before each commit.
Who has lost the run does not know its successor as its own, so two cannot take it from each other
again and again.
"""

import contextlib
import errno
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from gptddp.errors import ConfigError, Superseded
from gptddp.files import FULL, explain
from gptddp.run import lease_file
from gptddp.run.directory import LEASE

PERIOD_S = 2.0  # between two touches by the holder
EXPIRY_S = 12.0  # without a touch, after which a lease is taken over; a slow volume delays some
_POLL_S = 0.25
_RENEWALS = 2  # seen by a poller that prove a living holder: one may be the last, seen late
_WORD_S = 60.0  # between two words of who waits

log = logging.getLogger(__name__)


class Lease:
    """The holder's end, made by a `Claim`: touches the file until it is released or lost."""

    def __init__(self, path: Path, me: dict[str, Any], expired: bytes | None = None) -> None:
        self.path, self.me = path, me
        self.expired = expired  # the lease that a full disk has kept us from replacing
        self.lost = ""  # why the run is another's
        self._over = threading.Event()
        threading.Thread(target=self._renew, name="lease", daemon=True).start()

    def check(self) -> None:
        """Raise Superseded where the run is another's now; OSError where that cannot be told."""
        if not self.lost:
            seen = lease_file.read(self.path)
            if seen and seen[0] == self.expired and lease_file.remove_if_unchanged(self.path, seen):
                seen = None
            if seen is None:  # or removed by hand
                lease_file.create(self.path, self.me)
                seen = lease_file.read(self.path)
            other = lease_file.parse(seen[0]) if seen else None
            if other and other["holder"] != self.me["holder"]:
                who = lease_file.describe(other)
                self.lost = f"{who} has taken over the run: this life of it is over"
        if self.lost:
            raise Superseded(self.lost)

    def release(self) -> None:
        """Remove the lease: nothing will be committed any more."""
        self.close()
        with contextlib.suppress(OSError, Superseded):
            self.check()
            os.unlink(self.path)

    def close(self) -> None:
        """Touch it no more: it expires, where nobody knows before that this process is over."""
        self._over.set()

    def _renew(self) -> None:
        warned = False
        while not self._over.wait(PERIOD_S):
            try:
                self.check()
                os.utime(self.path)
                warned = False
            except Superseded:
                return  # the training loop reports it
            except OSError as error:
                if not warned:  # once for each outage
                    log.warning("%s cannot be renewed (%s)", self.path, error.strerror)
                warned = True


class Claim:
    """Rank 0 only: the poller's end, until the run is ours.

    `job`: its name, None where it has none; `life`: the id of this life; `follows`: those of lives
    that are over. A run that is `known` goes on when the disk is full or read-only: its lease is
    written when the disk works again, and before that nothing is committed.
    `patient`: a lease that this process has had itself is another's until it has expired.
    `silent_s`: for how long the mesh has not heard the holder: time without a touch, as the rest.
    A holder that lives renews its lease several times in what is left of EXPIRY_S, and keeps it.
    """

    def __init__(
        self,
        run: Path,
        job: str | None = None,
        life: str = "",
        follows: Iterable[str] = (),
        known: bool = False,
        patient: bool = False,
        silent_s: float = 0.0,
    ) -> None:
        self._patient, self._expiry_s = patient, EXPIRY_S - silent_s
        self.path, self.known, self.follows = run / LEASE, known, frozenset(follows)
        self._me = lease_file.lease_of(job, life or uuid.uuid4().hex)
        self._seen: lease_file.Reading | None = None  # when it was last read
        self._gone = False  # was there none at the last look?
        self._renewals = 0
        self._end = math.inf  # monotonic: of the wait, unless there is a renewal
        self._next_word = 0.0  # monotonic: when what is waited for is said again
        self._trouble = 0  # errno, as long as the directory cannot be used

    def poll(self, seconds: float) -> Lease | None:
        """Wait for so long at most; the lease once it is ours.

        Raises ConfigError where a job of another name has the run, OSError where the directory is
        unusable from the start: one that becomes so during the wait is waited for.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                if (lease := self._try()) is not None:
                    return lease
                self._trouble = 0
            except OSError as error:
                if self._seen is None:
                    raise
                self._end = math.inf  # what has not been seen may have been renewed
                if error.errno != self._trouble:
                    text = "run %s: waiting until its directory can be used: %s"
                    log.warning(text, self.path.parent, explain(error))
                self._trouble = error.errno or 0
            if time.monotonic() >= end:
                return None
            time.sleep(_POLL_S)

    def _try(self) -> Lease | None:
        """Look once, and take the run if it is free."""
        seen = lease_file.read(self.path)
        gone, self._gone = self._gone, seen is None
        if seen is None and self._seen is not None and not gone:
            return None  # the next life of who had it may be about to write its own: look again
        if seen is not None and not self._is_free(seen):
            return None
        try:
            gone = seen is None or lease_file.remove_if_unchanged(self.path, seen)
            return Lease(self.path, self._me) if gone and self._is_taken() else None
        except OSError as error:
            if not self.known or error.errno not in (*FULL, errno.EROFS):
                raise
            return Lease(self.path, self._me, seen[0] if seen else b"")

    def _is_free(self, seen: lease_file.Reading) -> bool:
        """May the lease that was read be taken away? Says what is waited for."""
        lease, now = lease_file.parse(seen[0]), time.monotonic()
        own = lease is not None and self._patient and lease["pid"] == self._me["pid"]
        if (
            lease
            and not own
            and (lease["owner"] in self.follows or lease_file.is_over(lease, self._me))
        ):
            return True
        if self._seen is None:
            what = lease_file.describe(lease) if lease else f"{self.path}, which is damaged,"
            text = "run %s: waiting %.0f s to see whether %s is still there"
            log.warning(text, self.path.parent, self._expiry_s, what)
        elif seen != self._seen:
            self._renewals += 1
            self._end = math.inf
        self._seen = seen
        if self._end == math.inf:
            self._end = now + self._expiry_s
        if now > self._end:
            text = "run %s: taken over, its lease has not been renewed"
            log.warning(text, self.path.parent)
            return True
        if self._renewals >= _RENEWALS:
            self._refuse_or_wait(lease, now)
        return False

    def _refuse_or_wait(self, holder: dict[str, Any] | None, now: float) -> None:
        """Somebody renews the lease: who has our name may be our job, cut off from these pods."""
        run, who = self.path.parent, lease_file.describe(holder)
        # one that is torn may just be in the writing, by the next life of who is waited for
        if holder and (not holder.get("job") or holder["job"] != self._me["job"]):
            raise ConfigError(
                f"run {run} is in use by {who}, which renewed {LEASE} a moment ago: "
                "stop that job first, or give another --run-dir"
            )
        if now >= self._next_word:
            self._next_word = now + _WORD_S
            text = (
                "run %s: waiting as long as %s renews %s: none of these pods was in its present "
                "life (it is in another cluster, or cut off from these pods). To train here, stop "
                "that one; to end the wait, delete this job"
            )
            log.warning(text, run, who, LEASE)

    def _is_taken(self) -> bool:
        """Write the lease where there is none; is it ours? Of several, one succeeds."""
        if not lease_file.create(self.path, self._me):
            return False
        for rest in self.path.parent.glob(f".{LEASE}.*"):  # of a process killed within a removal
            rest.unlink(missing_ok=True)
        # again, if another's removal had just moved ours by mistake
        lease_file.create(self.path, self._me)
        lease = lease_file.parse((lease_file.read(self.path) or (b"", 0))[0])
        return lease is not None and lease["holder"] == self._me["holder"]


def inherit(path: Path, dead: Mapping[str, Any]) -> Lease:
    """The lease of a process that is gone, for one that ends its work and then releases it.

    `dead`: what that process had in the file. So a life that begins on this machine waits for it.
    Raises Superseded where the run is another's by now, OSError.
    """
    seen = lease_file.read(path)
    lease = lease_file.parse(seen[0]) if seen else None
    if seen and lease and lease["holder"] == dead["holder"]:
        mine = lease_file.lease_of(lease.get("job"), lease["owner"])
        if lease_file.remove_if_unchanged(path, seen) and lease_file.create(path, mine):
            return Lease(path, mine)
    raise Superseded(f"{lease_file.describe(lease)} has taken over the run")
