"""Which pods of a job are in the training now, and which it does without: lost, or on their way."""

from collections.abc import Mapping
from dataclasses import dataclass

from gptddp.k8s.objects import is_ready, started, wanted_pods
from gptddp.k8s.observe import rank_0_log
from gptddp.k8s.observe.facts import Facts

NEVER = float("inf")
_WHOLE_S = 1.0  # the API has whole seconds


@dataclass(frozen=True)
class World:
    """The pods of a training by the newest step that is known of it, and by what became of them.

    `down` are not up; `joining` are up, and have done no step yet.
    """

    wanted: int
    down: tuple[str, ...] = ()
    joining: tuple[str, ...] = ()
    is_stale: bool = False  # the newest step was done with pods that are gone since

    @property
    def sentence(self) -> str:
        """`3 of 4: demo-worker-2 is being replaced`; empty where all are in it."""
        words = {"being replaced": self.down, "joining": self.joining}
        parts = [f"{', '.join(it)} {_are(it)} {word}" for word, it in words.items() if it]
        number = self.wanted - len(self.down) - len(self.joining)
        return f"{number} of {self.wanted}: {'; '.join(parts)}" if parts else ""


def _are(names: tuple[str, ...]) -> str:
    return "are" if len(names) > 1 else "is"


def of_pods(begun: Mapping[str, float], per_pod: int, ranks: int, at: float) -> World:
    """By the newest step, which so many ranks have done `at` that time (unix seconds, as all here).

    begun: when each wanted pod was started, NEVER where it is not up. Where the step had fewer
    ranks than pods are there, those that have come last are joining.
    """
    if not (ranks and at):
        return World(len(begun))
    wanted, newest_first = len(begun), sorted(begun, key=begun.__getitem__, reverse=True)
    missing = {name for name, since in begun.items() if since + _WHOLE_S > at}
    if len(missing) == wanted:  # the job begins: that step is of a life before
        return World(wanted, is_stale=True)
    is_stale = ranks // per_pod > wanted - len(missing)
    missing.update(newest_first[: max(0, wanted - ranks // per_pod)])
    down = tuple(name for name in begun if name in missing and begun[name] == NEVER)
    joining = tuple(name for name in begun if name in missing and begun[name] != NEVER)
    return World(wanted, down, joining, is_stale)


def of_job(facts: Facts) -> World:
    """By a job's pods, and what rank 0 or the run's own log says of its newest step."""
    per_pod = str(facts.job["spec"].get("nprocPerNode") or 1)
    ranks, at = rank_0_log.world(facts.log or ())
    if step := (facts.job.get("status") or {}).get("newest"):  # of a local job
        ranks, at = step.get("world_size") or 0, step.get("time") or 0.0
    if not per_pod.isdigit():  # `auto`
        return World(wanted_pods(facts.job))
    pods = [pod for pod in facts.pods if pod["status"].get("phase") != "Succeeded"]
    begun = {pod["metadata"]["name"]: started(pod) if is_ready(pod) else NEVER for pod in pods}
    return of_pods(begun | dict.fromkeys(facts.missing, NEVER), int(per_pod), ranks, at)
