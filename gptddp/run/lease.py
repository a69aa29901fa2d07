"""One job at a time holds a run, by `lease.json` in the run directory, which it keeps touching.

The file names the job, the life and the process that hold the run. A new rank 0 of the same life
takes it over at once, if a majority has agreed that the holder is lost. So does a process that sees
that the holder is dead, which is possible on the same machine and in the same process namespace.
All others poll the file. While its time of change moves, a job of another name is refused, and one
of the same name waits. When it has not moved for EXPIRY_S, by the poller's own clock, the poller
takes over. No clock is compared with another machine's, no file system lock is used, and touching
needs no space on a full disk: it works on NFS.

A silent holder may come back, so a holder reads the lease again before each commit. Only a
majority takes over from it at once, so two sides cannot take the run from each other again and
again.
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
EXPIRY_S = 12.0  # without a touch, until a lease expires; a slow volume delays touches
_POLL_S = 0.25
_RENEWALS = 2  # proof of a living holder: a single renewal may be its last, seen late
_LOG_S = 60.0  # between two log lines of a waiting poller

log = logging.getLogger(__name__)


class Lease:
    """The holder's side, made by a `Claim`: touches the file until it is released or lost."""

    def __init__(self, path: Path, me: dict[str, Any], expired: bytes | None = None) -> None:
        self.path, self.me = path, me
        self.expired = expired  # the lease that a full disk kept us from replacing
        self.lost = ""  # why another process holds the run
        self._over = threading.Event()
        threading.Thread(target=self._renew, name="lease", daemon=True).start()

    def check(self) -> None:
        """Raise Superseded if another process holds the run, OSError if that is unknown."""
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
                self.lost = f"{who} has taken over the run: this life ends"
        if self.lost:
            raise Superseded(self.lost)

    def release(self) -> None:
        """Remove the lease. This process commits nothing afterwards."""
        self.close()
        with contextlib.suppress(OSError, Superseded):
            self.check()
            os.unlink(self.path)

    def close(self) -> None:
        """Stop touching the file: the lease expires, unless others see earlier that we ended."""
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
    """The poller's side, until the run is ours. Rank 0 only.

    `job`: its name or None; `life`: the id of this life; `follows`: the ids of lives whose
    lease may be taken at once.
    `known`: the run exists, and continues on a full or read-only disk: its lease is written when
    the disk works again, and nothing is committed before that.
    `patient`: a lease of this very process must expire too.
    `silent_s`: how long the mesh has not heard the holder; it counts as time without a touch. A
    living holder renews its lease several times in the rest of EXPIRY_S, and keeps it.
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
        self._seen: lease_file.Reading | None = None  # the lease at the last look
        self._gone = False  # was there no lease at the last look?
        self._renewals = 0
        self._end = math.inf  # monotonic: end of the wait, unless the lease is renewed
        self._next_log = 0.0  # monotonic: time of the next log line
        self._trouble = 0  # errno while the directory cannot be used

    def poll(self, seconds: float) -> Lease | None:
        """Wait for at most `seconds`; return the lease once it is ours.

        Raises ConfigError if a job of another name holds the run, OSError if the directory is
        unusable from the start. If it becomes unusable during the wait, the wait continues.
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
                self._end = math.inf  # the lease may have been renewed unseen
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
            return None  # the holder's next life may be about to write its lease: look again
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
        """May this lease be taken over? Logs the reason for a wait."""
        lease, now = lease_file.parse(seen[0]), time.monotonic()
        own = lease is not None and self._patient and lease["pid"] == self._me["pid"]
        if (
            lease
            and not own
            and (lease["owner"] in self.follows or lease_file.is_over(lease, self._me))
        ):
            return True
        if self._seen is None:
            what = lease_file.describe(lease) if lease else f"the writer of the damaged {self.path}"
            text = "run %s: waiting %.0f s to see whether %s is still alive"
            log.warning(text, self.path.parent, self._expiry_s, what)
        elif seen != self._seen:
            self._renewals += 1
            self._end = math.inf
        self._seen = seen
        if self._end == math.inf:
            self._end = now + self._expiry_s
        if now > self._end:
            text = "run %s: taken over, because its lease was not renewed"
            log.warning(text, self.path.parent)
            return True
        if self._renewals >= _RENEWALS:
            self._refuse_or_wait(lease, now)
        return False

    def _refuse_or_wait(self, holder: dict[str, Any] | None, now: float) -> None:
        """The holder is alive. If it has our job's name, it may be our job, but cut off from us."""
        run, who = self.path.parent, lease_file.describe(holder)
        # a torn lease may be half written, by the holder's next life
        if holder and (not holder.get("job") or holder["job"] != self._me["job"]):
            raise ConfigError(
                f"run {run} is in use by {who}, which renewed {LEASE} a moment ago: "
                "stop that job first, or give another --run-dir"
            )
        if now >= self._next_log:
            self._next_log = now + _LOG_S
            text = (
                "run %s: waiting as long as %s renews %s: that job has none of this job's pods, so "
                "it is in another cluster or cut off from here. To train here, stop that job; to "
                "end the wait, delete this one"
            )
            log.warning(text, run, who, LEASE)

    def _is_taken(self) -> bool:
        """Write the lease if there is none. Is it ours? One of several pollers succeeds."""
        if not lease_file.create(self.path, self._me):
            return False
        for rest in self.path.parent.glob(f".{LEASE}.*"):  # of processes killed in a removal
            rest.unlink(missing_ok=True)
        # again, if another process's removal moved ours by mistake
        lease_file.create(self.path, self._me)
        lease = lease_file.parse((lease_file.read(self.path) or (b"", 0))[0])
        return lease is not None and lease["holder"] == self._me["holder"]


def inherit(path: Path, dead: Mapping[str, Any]) -> Lease:
    """Take the lease of a dead process, to finish its work and then release the lease.

    `dead`: the lease of that process. A life that begins on this machine meanwhile waits for us.
    Raises Superseded if another process holds the run by now, OSError.
    """
    seen = lease_file.read(path)
    lease = lease_file.parse(seen[0]) if seen else None
    if seen and lease and lease["holder"] == dead["holder"]:
        mine = lease_file.lease_of(lease.get("job"), lease["owner"])
        if lease_file.remove_if_unchanged(path, seen) and lease_file.create(path, mine):
            return Lease(path, mine)
    raise Superseded(f"{lease_file.describe(lease)} has taken over the run")
