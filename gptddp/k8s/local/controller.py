"""Imitates the training operator (v1.9) for local pods, one `tick` at a time."""

import errno
from collections.abc import Callable
from pathlib import Path

from gptddp.k8s.exit_codes import FIRST_RETRYABLE, NOT_EXECUTABLE, NOT_STARTED, described
from gptddp.k8s.local.pods import Pod, utc_now
from gptddp.k8s.objects import Object

FINAL = ("Succeeded", "Failed")


class Conditions:
    """The list in a PyTorchJob's `.status.conditions`; the newest change is the last entry."""

    def __init__(self) -> None:
        self.items: list[dict[str, str]] = []

    def has(self, kind: str) -> bool:
        """Is the condition of this type True?"""
        return any(c["type"] == kind and c["status"] == "True" for c in self.items)

    @property
    def final(self) -> bool:
        return any(map(self.has, FINAL))

    def set(self, kind: str, message: str) -> bool:
        """Make one condition True; returns whether that changed anything.

        Once Succeeded or Failed nothing changes. Running and Restarting replace each other, and
        Running turns False at the end.
        """
        if self.final or self.has(kind):
            return False
        other = {"Running": "Restarting", "Restarting": "Running"}.get(kind)
        self.items = [c for c in self.items if c["type"] not in (kind, other)]
        at = utc_now()
        for condition in self.items:
            if condition["type"] == "Running" and kind in (*FINAL, "Suspended"):
                condition |= {"status": "False", "lastTransitionTime": at}
        about = {"type": kind, "status": "True", "reason": f"PyTorchJob{kind}", "message": message}
        self.items.append({**about, "lastUpdateTime": at, "lastTransitionTime": at})
        return True


class Controller:
    """Keeps the pods and the conditions of a job as its manifest requires.

    A pod with an exit code of 128 or more is replaced; a lower code fails the job (`restartPolicy:
    ExitCode`). The first pod that succeeds ends an elastic job, and the job's end stops the other
    pods (`cleanPodPolicy: Running`).
    """

    def __init__(self, job: Object, pods: list[Pod], event: Callable[[str], None]) -> None:
        self.name = str(job["metadata"]["name"])
        self.pods, self.event = pods, event
        self.conditions = Conditions()
        self.failure = ""  # the pod, its exit code and its last line
        self.failed_log: Path | None = None
        self.stopping = False

    @property
    def done(self) -> bool:
        """Does no pod run any more, and will none start?"""
        return not any(pod.alive or pod.waiting for pod in self.pods)

    def create(self) -> None:
        """Set Created; the first tick starts the pods."""
        self._condition("Created", "is created.")

    def tick(self, now: float) -> None:
        """Start pods that are due, and handle pods that have ended. `now`: monotonic."""
        for pod in self.pods:
            if pod.waiting and now >= pod.start_at:
                self._start(pod, now)
            elif now >= pod.deadline:
                self.event(f"{pod.name} did not stop within {pod.plan.grace_s:.0f} s: SIGKILL")
                pod.kill()
        if not self.stopping and any(pod.phase == "Running" for pod in self.pods):
            self._condition("Running", "is running.")
        ended = [(pod, code) for pod in self.pods if (code := pod.poll()) is not None]
        # The operator handles failed pods before succeeded ones.
        for pod, code in sorted(ended, key=lambda end: end[1] == 0):
            self._ended(pod, code, now)

    def stop(self, now: float) -> None:
        """Ask every pod to stop; start none again."""
        self.stopping = True
        for pod in self.pods:
            pod.terminate(now)

    def kill(self) -> None:
        """End every pod now."""
        self.stopping = True
        for pod in self.pods:
            pod.kill()

    def suspended(self) -> None:
        """Set Suspended: the job was stopped before its end, and has no pods."""
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
        """Handle a pod's exit."""
        said = f"{pod.name} exited with {described(code)}"
        if code == 0:
            pod.phase = "Succeeded"
            self._end("Succeeded", "is successfully completed.", now)
        elif pod.ending:
            pod.phase = "Deleted"
        elif code >= FIRST_RETRYABLE:
            self.event(f"{said}: another pod takes its place")
            pod.recreate()
            self._condition("Restarting", "is restarting because 1 Worker replica(s) failed.")
        else:
            pod.phase = "Failed"
            line = pod.last_line()
            self.failure = f"pod {said}" + (f": {line}" if line else "")
            self.failed_log = pod.log
            text = f"is failed because 1 Worker replica(s) failed. {self.failure}"
            self._end("Failed", text, now)

    def _end(self, kind: str, text: str, now: float) -> None:
        self._condition(kind, text)
        for pod in self.pods:
            pod.terminate(now)

    def _condition(self, kind: str, text: str) -> None:
        if self.conditions.set(kind, f"PyTorchJob {self.name} {text}"):
            self.event(f"job {kind}")
