"""The logs of a job's pods: merged once, or followed through lost connections and lost pods."""

import heapq
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime

from gptddp.k8s.cli.command import note
from gptddp.k8s.cluster import Cluster, ClusterError
from gptddp.k8s.observe import why
from gptddp.k8s.observe.facts import Facts, Object, place, short
from gptddp.k8s.observe.pod_log import CONTAINER, Follow, PodLog, parse
from gptddp.k8s.observe.wait import Teller
from gptddp.k8s.observe.watcher import EVERY_S, Watcher, look

Write = Callable[[str], None]  # gets a line without its end


def show(
    cluster: Cluster, pods: Sequence[Object], write: Write, *, prefix: bool = True,
    previous: bool = False, tail: int | None = None,
) -> None:  # fmt: skip
    """Write what the pods have logged until now, in the order of time.

    `tail` is of each pod. A pod whose log cannot be read is noted on stderr.
    """

    def lines(pod: Object) -> Iterator[tuple[datetime, int, str]]:
        name, opened = pod["metadata"]["name"], f"[{short(pod)}] " if prefix else ""
        at = datetime.min.replace(tzinfo=UTC)
        try:
            for line in cluster.log(name, container=CONTAINER, previous=previous, tail=tail):
                found, text = parse(line)
                at = found or at
                yield at, place(pod)[1], opened + text
        except ClusterError as error:
            note(f"pod {name}: {error}")

    for _, _, line in heapq.merge(*map(lines, pods), key=lambda entry: entry[:2]):
        write(line)


def show_job(
    cluster: Cluster, name: str, write: Write, *, rank: int | None = None,
    previous: bool = False, tail: int | None = None,
) -> None:  # fmt: skip
    """Write the logs of a job's pods, or with `rank` of the one of this index, and end.

    Raises NotFoundError and ClusterError.
    """
    facts = look(cluster, name)
    if facts is None:
        raise cluster.not_found(name)
    pods = [pod for pod in facts.pods if rank is None or place(pod)[1] == rank]
    if not pods:
        reason = why.why(facts)
        note(f"{name} is {why.state(facts.job)} and has no such pods" + (reason and f": {reason}"))
    show(cluster, pods, write, prefix=rank is None, previous=previous, tail=tail)


def follow(
    cluster: Cluster, name: str, write: Write, *, rank: int | None = None,
    tail: int | None = None, say: Callable[[str], None] = lambda text: None,
) -> None:  # fmt: skip
    """Write the lines of all pods as they come, each opened by `[w0] `, until the job has ended.

    With `rank`, only the pod of this index, without the opening. Waits for pods that are not there
    yet, takes up those that come later, and ends when the job is final, or gone, and its pods have
    nothing left to say. `write` gets a line without its end, from one thread at a time; `say` is
    told each change of the job's state. Raises NotFoundError, ClusterError, and what `write`
    raises.
    """
    watcher, teller = Watcher(cluster, name, say), Teller(name, say)
    shared = Follow(cluster, write, prefix=rank is None)
    threads: dict[str, PodLog] = {}
    facts, end_s = watcher.look(), 0.0
    if facts is None:
        raise cluster.not_found(name)
    try:
        while True:
            _see(shared, facts, rank, teller)
            for pod_name, pod in shared.pods.items():
                if pod_name not in threads:
                    threads[pod_name] = PodLog(shared, pod, tail)
                    threads[pod_name].start()
            tail = None  # of those that come later every line is new
            if shared.ending.is_set():
                end_s = end_s or time.monotonic()
                if all(t.done(time.monotonic() - end_s) for t in threads.values()):
                    break
            if shared.stopped.wait(EVERY_S):
                break
            facts = watcher.look()
    finally:
        # No thread may be inside of `write` when the caller goes on, or the process ends.
        shared.stopped.set()
        if shared.lock.acquire(timeout=1.0):
            shared.lock.release()
    if shared.error:
        raise shared.error


def _see(shared: Follow, facts: Facts | None, rank: int | None, teller: Teller) -> None:
    """Tell the threads of one look: first the pods, then whether others can come."""
    pods = facts.pods if facts else ()
    wanted = [pod for pod in pods if rank is None or place(pod)[1] == rank]
    shared.pods = {str(pod["metadata"]["name"]): pod for pod in wanted}
    if teller.tell(facts) in (*why.FINAL, ""):
        shared.ending.set()
