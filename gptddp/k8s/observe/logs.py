"""The logs of a job's pods: merged once, or followed through lost connections and lost pods."""

import heapq
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from gptddp.errors import ConfigError
from gptddp.k8s.cluster import Cluster
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.objects import Object, role_and_index, short_name, wanted_pods
from gptddp.k8s.observe import facts, why
from gptddp.k8s.observe.endings import ends, how_it_ended
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.pod_log import CONTAINER, Follow, PodLog, parse
from gptddp.k8s.observe.wait import Changes
from gptddp.k8s.observe.watcher import POLL_S, Say, of_job

Write = Callable[[str], None]  # gets a line without its end


@dataclass(frozen=True)
class Part:
    """Selects lines: of all pods, or of the pod of `index`, then without the prefix.

    `tail`: number of last lines per pod. `since_s`: maximum age of lines. `previous`: lines from
    before the containers' last restart.
    """

    index: int | None = None
    tail: int | None = None
    since_s: float | None = None
    previous: bool = False


ALL = Part()


def of_index(pods: Sequence[Object], index: int | None) -> list[Object]:
    """The pod of this index, or all pods."""
    return [pod for pod in pods if index is None or role_and_index(pod)[1] == index]


def check_index(found: Facts, index: int | None, *, may_come: bool = False) -> None:
    """Raise ConfigError if no pod has this index, or with `may_come`, if none can have it."""
    most = (found.job["spec"].get("elasticPolicy") or {}).get("maxReplicas")
    if index is None or of_index(found.pods, index):
        return
    if may_come and index < (most or wanted_pods(found.job)):
        return
    there = ", ".join(str(role_and_index(pod)[1]) for pod in found.pods)
    has = f"its pods are {there}" if there else "it has no pods now"
    raise ConfigError(f"--pod {index}: {found.name} has no such pod: {has}")


def show(
    cluster: Cluster,
    pods: Sequence[Object],
    write: Write,
    say: Say,
    part: Part = ALL,
    prefix: bool = True,
) -> bool:
    """Write the pods' logs so far, sorted by time. Returns whether there was any line.

    `say` reports pods whose log cannot be read. Raises ClusterError without the right to read logs.
    """
    any_line = False

    def lines(pod: Object) -> Iterator[tuple[datetime, int, str]]:
        name, opening = pod["metadata"]["name"], f"[{short_name(pod)}] " if prefix else ""
        index, at = role_and_index(pod)[1], datetime.min.replace(tzinfo=UTC)
        try:
            for line in cluster.log(
                name,
                container=CONTAINER,
                previous=part.previous,
                tail=part.tail,
                since_s=part.since_s,
            ):
                found, text = parse(line)
                at = found or at
                yield at, index, opening + text
        except ClusterError as error:
            if error.status == 403:  # applies to all pods
                raise
            say(f"pod {name}: {error}")

    for _, _, line in heapq.merge(*map(lines, pods), key=lambda entry: entry[:2]):
        write(line)
        any_line = True
    return any_line


def show_job(cluster: Cluster, name: str, write: Write, say: Say, part: Part) -> None:
    """Write the logs of a job's pods so far. Raises NotFoundError, ConfigError, ClusterError."""
    found = facts.of_job(cluster, name)
    check_index(found, part.index)
    pods = of_index(found.pods, part.index)
    if not show(cluster, pods, write, say, part, prefix=part.index is None):
        _say_state(found, say, "its logs have no line to show" if pods else "has no pods")


def show_first_failure(cluster: Cluster, name: str, write: Write, say: Say, part: Part) -> None:
    """Write the log of the container that failed first, and say how it ended.

    The other containers end later, because of it. Raises NotFoundError and ClusterError.
    """
    found = facts.of_job(cluster, name)
    first = next((end for end in ends(found.pods) if end.container == CONTAINER), None)
    if first is None:
        return _say_state(found, say, "no existing pod has failed")
    at = f" at {when}" if (when := first.terminated.get("finishedAt")) else ""
    how = how_it_ended(first.pod, CONTAINER, first.terminated)
    say(f"pod {first.pod['metadata']['name']} failed first{at}: {how}")
    of_it = replace(part, previous=first.previous)
    show(cluster, [first.pod], write, say, of_it, prefix=False)


def _say_state(found: Facts, say: Say, but: str) -> None:
    reason = why.why(found)
    because = f": {reason}" if reason else ""
    say(f"{found.name} is {why.state(found.job, found.queue)}, and {but}{because}")


def follow(
    cluster: Cluster,
    name: str,
    write: Write,
    say: Say,
    part: Part = ALL,
    tell_changes: bool = True,
    stopped: threading.Event | None = None,
) -> None:
    """Write the lines of all pods as they come, each prefixed by `[w0] `, until the job has ended.

    Waits for pods that do not exist yet, follows pods that appear later, and ends when the job is
    final or gone and its pods have written their last lines. `write` is called from one thread at a
    time; `say` gets notes, and with `tell_changes` each change of the job's state. Another thread
    may set `stopped`: then no line follows.
    Raises NotFoundError, ConfigError, ClusterError, and any error of `write`.
    """
    tell: Say = say if tell_changes else lambda text: None
    shared = Follow(
        cluster,
        write,
        say,
        prefix=part.index is None,
        since_s=part.since_s,
        stopped=stopped or threading.Event(),
    )
    try:
        _follow_pods(shared, Changes(name, tell), part)
    finally:
        # No thread may be inside `write` when the caller continues or the process ends.
        shared.stopped.set()
        if shared.lock.acquire(timeout=1.0):
            shared.lock.release()
    if shared.error:
        raise shared.error


def _follow_pods(shared: Follow, changes: Changes, part: Part) -> None:
    """Poll, with a thread for the log of each pod, until all logs of an ended job are read."""
    threads: dict[str, PodLog] = {}
    tail, end_s = part.tail, 0.0
    watcher = of_job(shared.cluster, changes.name, changes.say)
    found = watcher.poll()
    if found is None:
        raise shared.cluster.not_found(changes.name)
    check_index(found, part.index, may_come=True)
    while True:
        pods = of_index(found.pods if found else (), part.index)
        shared.pods = {str(pod["metadata"]["name"]): pod for pod in pods}
        if changes.tell(found) in (*why.FINAL, ""):  # after the update of pods: no pod comes later
            shared.ending.set()
        for name, pod in shared.pods.items():
            if name not in threads:
                threads[name] = PodLog(shared, pod, tail)
                threads[name].start()
        tail = None  # every line of a pod that appears later is new
        if shared.ending.is_set():
            end_s = end_s or time.monotonic()
            if all(thread.done(time.monotonic() - end_s) for thread in threads.values()):
                return
        if shared.stopped.wait(POLL_S):
            return
        found = watcher.poll()
