"""Follows the log of one pod, and of every pod that replaces it, in a thread.

A line is identified by its full time and its text. The API continues a log from a whole second
only, so a new connection starts one or two seconds back, and skips lines already written.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime

from gptddp.k8s.cluster import Cluster
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.objects import (
    Object,
    container_statuses,
    has_ended,
    has_log,
    seconds,
    short_name,
)
from gptddp.k8s.observe.watcher import Say, transient

CONTAINER = "pytorch"  # the training container's name in every PyTorchJob
QUIET_S = 30.0  # a connection without a byte for this time may be dead: reconnect
DRAIN_S = 5.0  # silence after which the wait for a pod of an ended job ends
STAY_S = 15.0  # how long to follow a pod that still runs after the job's end
RETRY_S = 0.5


def parse(line: str) -> tuple[datetime | None, str]:
    """Time and text of a log line; None for a message of the kubelet itself."""
    stamp, _, text = line.partition(" ")
    try:
        at = datetime.fromisoformat(stamp)
        return (at if at.tzinfo else None), text
    except ValueError:
        return None, line


class RecentLines:
    """The lines written in the last two seconds, so that none is written twice."""

    def __init__(self) -> None:
        self.since = ""  # RFC 3339; start of the next connection
        self._seconds: dict[datetime, list[str]] = {}

    def add(self, at: datetime, line: str) -> None:
        """Remember a line."""
        second = at.astimezone(UTC).replace(microsecond=0)
        if second not in self._seconds:
            if self._seconds and second < min(self._seconds):
                return  # out of order by a second or more: no connection asks for it again
            self._seconds[second] = []
            for old in sorted(self._seconds)[:-2]:
                del self._seconds[old]
            self.since = min(self._seconds).isoformat().replace("+00:00", "Z")
        self._seconds[second].append(line)

    def counts(self) -> Counter[str]:
        """The lines that the next connection will repeat, each with its count."""
        return Counter(line for lines in self._seconds.values() for line in lines)


@dataclass
class Follow:
    """State shared by the threads of one `logs.follow`."""

    cluster: Cluster
    write: Callable[[str], None]
    say: Say
    prefix: bool
    since_s: float | None = None  # maximum age of the first lines
    pods: Mapping[str, Object] = field(default_factory=dict)  # by name, as of the last poll
    # the job is final or gone: no new pod appears
    ending: threading.Event = field(default_factory=threading.Event)
    stopped: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def write_line(self, text: str) -> None:
        """Write one line, from any thread."""
        with self.lock:
            if self.stopped.is_set():
                return
            try:
                self.write(text)
            except BaseException as error:  # the reader is gone: the main thread raises it
                self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End `logs.follow` with this error."""
        self.error = self.error or error
        self.stopped.set()


class PodLog(threading.Thread):
    """Follows the pod of one name in a thread; a pod that replaces it has another uid."""

    def __init__(self, follow: Follow, pod: Object, tail: int | None) -> None:
        self.pod_name = str(pod["metadata"]["name"])
        super().__init__(name=f"log-{self.pod_name}", daemon=True)
        self.follow, self.tail = follow, tail
        self.opening = f"[{short_name(pod)}] " if follow.prefix else ""
        self.uid = self.finished = ""  # uid of the pod being read, and of the last one fully read
        self.restarts = 0
        self.recent, self.notes = RecentLines(), set[str]()
        self.last_s = time.monotonic()  # when the last line came

    def run(self) -> None:
        try:
            while not self.follow.stopped.is_set():
                pod = self.follow.pods.get(self.pod_name)
                if pod and pod["metadata"]["uid"] != self.finished and has_log(pod):
                    self._read()
                elif self.follow.ending.is_set():
                    return
                self.follow.stopped.wait(RETRY_S)
        except BaseException as error:
            self.follow.fail(error)

    def done(self, since_end_s: float) -> bool:
        """Has the pod of an ended job written its last line, or is it not worth waiting for?"""
        if not self.is_alive():
            return True
        pod = self.follow.pods.get(self.pod_name)
        stopping = seconds(pod["metadata"].get("deletionTimestamp")) if pod else None
        if pod and not has_ended(pod) and stopping is None and since_end_s > STAY_S:
            return True
        in_grace = stopping is not None and time.time() < stopping
        return not in_grace and min(since_end_s, time.monotonic() - self.last_s) > DRAIN_S

    def _read(self) -> None:
        """Read one connection to its end; after the container's end, the remaining lines."""
        try:  # the last poll may show a pod that has been replaced since
            pod = self.follow.cluster.get("Pod", self.pod_name)
        except ClusterError as error:
            if transient(error):
                return
            raise
        if pod is None or not has_log(pod):
            return
        over = has_ended(pod)
        restarts = sum(int(c.get("restartCount", 0)) for c in container_statuses(pod))
        if pod["metadata"]["uid"] != self.uid:  # the new pod's node may have another clock
            self.uid, self.restarts = str(pod["metadata"]["uid"]), restarts
            self.recent, self.notes = RecentLines(), set()
        if restarts > self.restarts:  # the container's last lines may be missing
            self._connect(previous=True)
            self.restarts = restarts
        if self._connect(following=not over) and over:
            self.finished = self.uid

    def _connect(self, *, following: bool = False, previous: bool = False) -> bool:
        """Write the new lines of one connection. Returns whether it reached the log's end."""
        known, tail = self.recent.counts(), self.tail
        lines = self.follow.cluster.log(
            self.pod_name,
            container=CONTAINER,
            follow=following,
            previous=previous,
            tail=tail,
            since_time=self.recent.since,
            since_s=self.follow.since_s,
            quiet_s=QUIET_S,
            keep_ends=True,
        )
        try:
            for count, line in enumerate(lines):
                if count == 0 and not self._is_of_this_pod(line):
                    return False
                if following and not line.endswith("\n"):
                    return False  # cut when the node disappeared: the whole line comes again
                self._write_new(line.removesuffix("\n"), known)
            return True
        except ClusterError as error:
            if error.status in (400, 404):  # the container does not exist yet, or any more
                return not following
            if transient(error):
                return False
            raise

    def _is_of_this_pod(self, line: str) -> bool:
        """Is this the log of the pod being read, and not of one that has just replaced it?"""
        try:
            pod = self.follow.cluster.get("Pod", self.pod_name)
        except ClusterError:
            return True
        if pod is None or pod["metadata"]["uid"] == self.uid:
            return True
        created, at = seconds(pod["metadata"].get("creationTimestamp")), parse(line)[0]
        return created is None or at is None or at.timestamp() < created

    def _write_new(self, line: str, known: Counter[str]) -> None:
        self.last_s, self.tail = time.monotonic(), None
        if known[line]:
            known[line] -= 1
            return
        at, text = parse(line)
        if at:
            self.recent.add(at, line)
            self.follow.write_line(self.opening + text)
        elif line not in self.notes:
            self.notes.add(line)
            self.follow.say(f"pod {self.pod_name}: {line}")
