"""Which pods of a job take part in the training now, and which are lost or still starting."""

from collections.abc import Mapping
from dataclasses import dataclass

from gptddp.k8s.objects import is_ready, ranks_per_pod, started, wanted_pods
from gptddp.k8s.observe import rank_0_log
from gptddp.k8s.observe.facts import Facts

NEVER = float("inf")
_WHOLE_S = 1.0  # times of the API are whole seconds


@dataclass(frozen=True)
class World:
    """The number of pods of a training, and the pods missing from its newest step."""

    wanted: int
    missing: tuple[str, ...] = ()
    is_stale: bool = False  # pods of the newest step are gone since

    @property
    def sentence(self) -> str:
        """`3 of 4: demo-worker-2 is being replaced`; "" if all pods take part."""
        number, verb = self.wanted - len(self.missing), "are" if self.missing[1:] else "is"
        text = f"{number} of {self.wanted}: {', '.join(self.missing)} {verb} being replaced"
        return text if self.missing else ""


def of_pods(begun: Mapping[str, float], per_pod: int, ranks: int, at: float) -> World:
    """The world by the newest step, which `ranks` ranks did at `at` (unix seconds, as all times).

    begun: when each wanted pod started, NEVER if it does not run. If the step had fewer ranks than
    the running pods have, the pods that started last are still joining.
    """
    if not (ranks and at):
        return World(len(begun))
    wanted, newest_first = len(begun), sorted(begun, key=begun.__getitem__, reverse=True)
    missing = {name for name, since in begun.items() if since + _WHOLE_S > at}
    if len(missing) == wanted:  # the job is starting: the step is of an earlier life
        return World(wanted, is_stale=True)
    is_stale = ranks // per_pod > wanted - len(missing)
    missing.update(newest_first[: max(0, wanted - ranks // per_pod)])
    return World(wanted, tuple(sorted(missing)), is_stale)


def of_job(facts: Facts) -> World:
    """The world by a job's pods and the newest step in rank 0's log or, if local, the run's log."""
    per_pod = ranks_per_pod(facts.job)
    ranks, at = rank_0_log.world(facts.log or ())
    if step := (facts.job.get("status") or {}).get("newest"):  # of a local job
        ranks, at = step.get("world_size") or 0, step.get("time") or 0.0
    if per_pod is None:
        return World(wanted_pods(facts.job))
    pods = [pod for pod in facts.pods if pod["status"].get("phase") != "Succeeded"]
    begun = {pod["metadata"]["name"]: started(pod) if is_ready(pod) else NEVER for pod in pods}
    return of_pods(begun | dict.fromkeys(facts.missing, NEVER), per_pod, ranks, at)
