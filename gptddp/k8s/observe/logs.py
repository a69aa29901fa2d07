"""The logs of a job's pods: merged once, or followed through lost connections and lost pods."""

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from gptddp.errors import ClusterError
from gptddp.k8s.cluster import Cluster
from gptddp.k8s.objects import Object, role_and_index, short_name
from gptddp.k8s.observe import facts, why
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.pod_log import CONTAINER, Follow, PodLog, parse
from gptddp.k8s.observe.wait import Changes
from gptddp.k8s.observe.watcher import POLL_S, Say, Watcher

Write = Callable[[str], None]  # gets a line without its end


def show(
    cluster: Cluster,
    pods: Sequence[Object],
    write: Write,
    say: Say,
    *,
    prefix: bool = True,
    previous: bool = False,
    tail: int | None = None,
    since_s: float | None = None,
) -> None:
    """Write what the pods have logged until now, in the order of time.

    `tail` is of each pod; `since_s`: lines that are not older. `say` is told of a pod whose log
    cannot be read. Raises ClusterError for who may not read logs.
    """

    def lines(pod: Object) -> Iterator[tuple[datetime, int, str]]:
        name, opening = pod["metadata"]["name"], f"[{short_name(pod)}] " if prefix else ""
        index, at = role_and_index(pod)[1], datetime.min.replace(tzinfo=UTC)
        try:
            for line in cluster.log(
                name, container=CONTAINER, previous=previous, tail=tail, since_s=since_s
            ):
                found, text = parse(line)
                at = found or at
                yield at, index, opening + text
        except ClusterError as error:
            if error.status == 403:  # it is the same of all of them
                raise
            say(f"pod {name}: {error}")

    for _, _, line in heapq.merge(*map(lines, pods), key=lambda entry: entry[:2]):
        write(line)


def show_job(
    cluster: Cluster,
    name: str,
    write: Write,
    say: Say,
    *,
    index: int | None = None,
    previous: bool = False,
    tail: int | None = None,
    since_s: float | None = None,
) -> None:
    """Write the logs of a job's pods, or with `index` of the one of this index, and end.

    Raises NotFoundError and ClusterError.
    """
    found = facts.of_job(cluster, name)
    pods = _of_index(found.pods, index)
    if not pods:
        state, reason = why.state(found.job, found.queue), why.why(found)
        say(f"{name} is {state} and has no such pods" + (reason and f": {reason}"))
    options: dict[str, Any] = {"previous": previous, "tail": tail, "since_s": since_s}
    show(cluster, pods, write, say, prefix=index is None, **options)


def follow(
    cluster: Cluster,
    name: str,
    write: Write,
    say: Say,
    *,
    index: int | None = None,
    tail: int | None = None,
    since_s: float | None = None,
    tell_changes: bool = True,
) -> None:
    """Write the lines of all pods as they come, each opened by `[w0] `, until the job has ended.

    With `index`, only the pod of this index, without the opening. Waits for pods that are not there
    yet, takes up those that come later, and ends when the job is final, or gone, and its pods have
    nothing left to write. `write` gets a line without its end, from one thread at a time; `say` is
    told what is no log line, and with `tell_changes` each change of the job's state. Raises
    NotFoundError, ClusterError, and what `write` raises.
    """
    tell: Say = say if tell_changes else lambda text: None
    watcher, changes = Watcher(cluster, name, tell), Changes(name, tell)
    shared = Follow(cluster, write, say, prefix=index is None, since_s=since_s)
    try:
        _follow_pods(shared, watcher, changes, index, tail)
    finally:
        # No thread may be inside of `write` when the caller goes on, or the process ends.
        shared.stopped.set()
        if shared.lock.acquire(timeout=1.0):
            shared.lock.release()
    if shared.error:
        raise shared.error


def _follow_pods(
    shared: Follow, watcher: Watcher, changes: Changes, index: int | None, tail: int | None
) -> None:
    """Poll, with a thread for the log of each pod, until all logs of an ended job are read."""
    threads: dict[str, PodLog] = {}
    end_s = 0.0
    found = watcher.poll()
    if found is None:
        raise watcher.cluster.not_found(watcher.name)
    while True:
        _update(shared, found, index, changes)
        _start_threads(shared, threads, tail)
        tail = None  # of those that come later every line is new
        if shared.ending.is_set():
            end_s = end_s or time.monotonic()
            if all(t.done(time.monotonic() - end_s) for t in threads.values()):
                return
        if shared.stopped.wait(POLL_S):
            return
        found = watcher.poll()


def _update(shared: Follow, found: Facts | None, index: int | None, changes: Changes) -> None:
    """Pass what was polled to the threads: first the pods, then whether others can come."""
    pods = _of_index(found.pods if found else (), index)
    shared.pods = {str(pod["metadata"]["name"]): pod for pod in pods}
    if changes.tell(found) in (*why.FINAL, ""):
        shared.ending.set()


def _start_threads(shared: Follow, threads: dict[str, PodLog], tail: int | None) -> None:
    """One for each pod that has none yet."""
    for name, pod in shared.pods.items():
        if name not in threads:
            threads[name] = PodLog(shared, pod, tail)
            threads[name].start()


def _of_index(pods: Sequence[Object], index: int | None) -> list[Object]:
    """The pods of this index, or all."""
    return [pod for pod in pods if index is None or role_and_index(pod)[1] == index]
