"""The training operator (v1.9) and the kubelet's restarts over local pods: one `tick` at a time."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gptddp.k8s.exit_codes import FIRST_RETRYABLE, NOT_EXECUTABLE, NOT_STARTED, described
from gptddp.k8s.local.conditions import Conditions
from gptddp.k8s.local.pods import Pod


class Controller:
    """Keeps the pods as the job wants them, and the job's conditions."""

    def __init__(self, job: dict[str, Any], pods: list[Pod], event: Callable[[str], None]) -> None:
        self.name = str(job["metadata"]["name"])
        self.elastic = job["spec"].get("elasticPolicy") is not None
        self.run_policy: dict[str, Any] = job["spec"].get("runPolicy") or {}
        self.pods, self.event = pods, event
        self.conditions = Conditions()
        self.failure = ""  # the pod, its exit code and its last line
        self.failed_log: Path | None = None
        self.stopping = False

    @property
    def done(self) -> bool:
        """Is no pod left that runs, or will run?"""
        return not any(pod.alive or pod.waiting for pod in self.pods)

    def create(self) -> None:
        """The job exists; its first pods come with the first tick."""
        self._condition("Created", "is created.")

    def tick(self, now: float) -> None:
        """Start what is due, collect what has ended, decide what follows. `now`: monotonic."""
        for pod in self.pods:
            if pod.waiting and now >= pod.start_at:
                self._start(pod, now)
            elif now >= pod.deadline:
                self.event(f"{pod.name} did not stop within {pod.plan.grace_s:.0f} s: SIGKILL")
                pod.kill()
        self._update_job(now)
        ended = [(pod, code) for pod in self.pods if (code := pod.poll()) is not None]
        # The operator looks at failed pods before it counts the succeeded ones.
        for pod, code in sorted(ended, key=lambda end: end[1] == 0):
            self._ended(pod, code, now)
        self._update_job(now)

    def stop(self, now: float) -> None:
        """Ask every pod to stop; none is started again."""
        self.stopping = True
        for pod in self.pods:
            pod.terminate(now)

    def kill(self) -> None:
        """End every pod now."""
        self.stopping = True
        for pod in self.pods:
            pod.kill()

    def suspended(self) -> None:
        """The job was stopped before its end: as a suspended one, it has no pods."""
        self._condition("Suspended", "is suspended.")

    def _start(self, pod: Pod, now: float) -> None:
        try:
            pod.start(now)
        except OSError as error:
            self.event(f"{pod.name} cannot be started: {error}")
            may_pass = error.errno in (errno.EAGAIN, errno.ENOMEM, errno.ENOSPC)
            pod.exit_code = NOT_STARTED if may_pass else NOT_EXECUTABLE
            self._ended(pod, pod.exit_code, now)

    def _ended(self, pod: Pod, code: int, now: float) -> None:
        """Apply the restart policy to a container that has exited."""
        succeeded, said = code == 0, f"{pod.name} exited with {described(code)}"
        if pod.ending:
            pod.phase = "Succeeded" if succeeded else "Deleted"
        elif pod.policy == "Always" or (pod.policy == "OnFailure" and not succeeded):
            delay_s = pod.restart(now)
            when = f"in {delay_s:.0f} s (back-off)" if delay_s else "at once"
            self.event(f"{said}: restarted {when}")
            self._back_off_limit(now)
        elif succeeded:
            pod.phase = "Succeeded"
            self.event(said)
        elif pod.policy == "ExitCode" and code >= FIRST_RETRYABLE and not self.conditions.final:
            self.event(f"{said}: another pod takes its place")
            pod.recreate(now)
            self._condition("Restarting", f"is restarting because {_replicas(pod)} failed.")
        else:
            pod.phase = "Failed"
            self._fail(pod, f"is failed because {_replicas(pod)} failed.", now)

    def _back_off_limit(self, now: float) -> None:
        """The sum of the restarts of all running pods, as the operator counts them."""
        limit = self.run_policy.get("backoffLimit")
        running = [pod for pod in self.pods if pod.phase == "Running"]
        restarts = sum(pod.restarts for pod in running)
        if limit is not None and restarts >= max(1, int(limit)):
            worst = max(running, key=lambda pod: pod.restarts)
            text = "has failed because it has reached the specified backoff limit."
            self._fail(worst, text, now, everything=True)

    def _update_job(self, now: float) -> None:
        """Succeeded or Running: by the Master; without one by all Workers, or by any if elastic."""
        if self.conditions.final:
            return
        masters = [pod for pod in self.pods if pod.plan.replica.role == "Master"]
        deciding = masters or self.pods
        succeeded = [pod.phase for pod in deciding].count("Succeeded")
        if succeeded == len(deciding) or (self.elastic and not masters and succeeded):
            self._condition("Succeeded", "is successfully completed.")
            self._clean(now)
        elif not self.stopping and any(pod.phase == "Running" for pod in deciding):
            self._condition("Running", "is running.")

    def _fail(self, pod: Pod, text: str, now: float, *, everything: bool = False) -> None:
        if not self.conditions.final:
            line = pod.last_line()
            self.failure = f"pod {pod.name} exited with {described(pod.exit_code or 0)}"
            self.failure += f": {line}" if line else ""
            self.failed_log = pod.log
            self._condition("Failed", f"{text} {self.failure}")
            self._clean(now, everything=everything)

    def _clean(self, now: float, *, everything: bool = False) -> None:
        """cleanPodPolicy; beyond a limit all pods go, whatever it says (operator <= 1.9.3)."""
        if everything or self.run_policy.get("cleanPodPolicy", "None") != "None":
            for pod in self.pods:
                pod.terminate(now)
        elif left := sum(pod.alive or pod.waiting for pod in self.pods):
            self.event(f"cleanPodPolicy None leaves {left} pods running; Ctrl-C stops them")

    def _condition(self, kind: str, text: str) -> None:
        if self.conditions.set(kind, f"PyTorchJob{kind}", f"PyTorchJob {self.name} {text}"):
            self.event(f"job {kind}")


def _replicas(pod: Pod) -> str:
    return f"1 {pod.plan.replica.role} replica(s)"
