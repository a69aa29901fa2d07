"""Runs the pods of a local job: the loop, the signals, the screen and `status.json`."""

import contextlib
import json
import os
import select
import shlex
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from gptddp import flags, units
from gptddp.k8s.exit_codes import FAILED, INTERRUPTED, SUCCEEDED
from gptddp.k8s.local import container, pods
from gptddp.k8s.local.controller import Controller
from gptddp.k8s.local.paths import relative_path
from gptddp.k8s.local.screen import Progress, Screen
from gptddp.k8s.objects import Object, ranks_per_pod
from gptddp.k8s.observe.world import NEVER
from gptddp.k8s.render import manifest

TICK_S = 0.2  # between two reads of the logs and the clock; an ended pod is noticed at once


class Interrupts:
    """Ctrl-C or SIGTERM requests a stop; Ctrl-C again, a moment later, a kill."""

    def __init__(self) -> None:
        self.stop = self.kill = False
        self._first = 0.0

    def __call__(self, number: int, frame: object) -> None:
        now = time.monotonic()
        # One Ctrl-C can arrive twice: from the terminal, and passed on by a parent.
        self.kill |= self.stop and number == signal.SIGINT and now - self._first > 0.3
        self._first = self._first if self.stop else now
        self.stop = True

    @contextlib.contextmanager
    def installed(self) -> Iterator["Interrupts"]:
        """Handle the signals. An ignored SIGHUP (nohup) stays ignored; an ignored SIGINT (a
        script's `&`) does not, as it is only sent to stop the job."""
        old = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    old[number] = signal.signal(number, self)
        try:
            yield self
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)


class Runner:
    """Runs a local job until it ends or is stopped."""

    def __init__(
        self, job: Object, folder: Path, plans: list[pods.Plan], tag: str, verbose: bool
    ) -> None:
        self.folder, self.first = folder, plans[0]
        self.run_dir = self.first.option(flags.flag("run_dir"))
        self.screen = Screen(folder.name)
        (folder / "logs").mkdir(exist_ok=True)
        write_text(folder / "manifest.yaml", manifest.to_yaml([job]))
        self.pods = [
            pods.Pod(p, folder / "logs" / f"{container.name_of(job, p.index)}.log", tag)
            for p in plans
        ]
        for pod in self.pods if verbose else []:
            self.screen.follow(f"worker-{pod.plan.index}", pod.log)
        per_pod = ranks_per_pod(job) or 1
        self.progress = Progress([pod.log for pod in self.pods], self.run_dir, per_pod)
        self.status_text = ""
        self.sessions: list[int] = []
        self.started = pods.utc_now()
        self.controller = Controller(job, self.pods, self._event)

    def run(self, reaper: IO[str], interrupts: Interrupts) -> int:
        """Run the loop; returns the exit code. `reaper`: a stream that gets the pods' sessions."""
        began = time.monotonic()
        logs = relative_path(self.folder / "logs")
        self.screen.event(f"{len(self.pods)} pods on {self.first.address} and up; {logs}")
        self.controller.create()
        while not self.controller.done:
            now = time.monotonic()
            self._obey(interrupts, now)
            self.controller.tick(now)
            self._tell_sessions(reaper)
            self.screen.logs()
            if self.screen.due(now):
                self.screen.progress(self._parts(), now)
            self._write_status()
            self._wait(now)
        for pod in self.pods:
            pod.wipe()
        return self._end(time.monotonic() - began)

    def _wait(self, now: float) -> None:
        """Wait until a process ends, a pod is due, or a tick is over."""
        fds = [pod.fd for pod in self.pods if pod.alive and pod.fd >= 0]
        soonest = min(pod.due for pod in self.pods) - now
        if not self.controller.done:
            select.select(fds, [], [], min(TICK_S, max(0.0, soonest)))

    def _tell_sessions(self, reaper: IO[str]) -> None:
        sessions = [pod.process.pid for pod in self.pods if pod.process]
        if sessions != self.sessions:
            self.sessions = sessions
            # An error: the reaper was killed. `reaper.sweep` still finds the pods, by tags.
            with contextlib.suppress(OSError):
                print(*sessions, file=reaper, flush=True)

    def _obey(self, interrupts: Interrupts, now: float) -> None:
        if interrupts.stop and not self.controller.stopping:
            grace = f"{self.first.grace_s:.0f} s"
            self.screen.event(f"stopping: the pods have {grace} to save; Ctrl-C again kills them")
            self.controller.stop(now)
        if interrupts.kill:
            self.controller.kill()

    def _parts(self) -> list[str]:
        boot = time.time() - time.monotonic()
        since = [boot + pod.started if pod.alive else NEVER for pod in self.pods]
        begun = {f"worker-{pod.plan.index}": it for pod, it in zip(self.pods, since, strict=True)}
        job = self.controller
        return self.progress.parts(begun, goes_on=not (job.stopping or job.conditions.final))

    def _event(self, text: str) -> None:
        self.screen.event(text)
        self._write_status()

    def _write_status(self) -> None:
        """Update `status.json`; errors are ignored, as the job does not depend on it."""
        value: dict[str, Any] = {
            "name": self.controller.name,
            "pid": os.getpid(),
            "startTime": self.started,
            "run": self.run_dir,
            "conditions": self.controller.conditions.items,
            "pods": {pod.name: pod.status() for pod in self.pods},
        }
        text = json.dumps(value, indent=1) + "\n"
        if text != self.status_text:
            with contextlib.suppress(OSError):  # a full disk: the next change is written
                write_text(self.folder / "status.json", text)
            self.status_text = text

    def _end(self, elapsed_s: float) -> int:
        """Print how the job ended and the next command; returns the exit code."""
        controller, screen = self.controller, self.screen
        screen.logs(rest=True)
        if not controller.conditions.final:
            controller.suspended()
        self._write_status()
        screen.close()
        screen.progress(self._parts(), 0.0)
        if controller.conditions.has("Failed"):
            screen.event(f"failed after {units.duration(round(elapsed_s))}: {controller.failure}")
            screen.event(f"full log: {relative_path(str(controller.failed_log))}")
            return FAILED
        if controller.conditions.has("Succeeded"):
            run = self.run_dir and shlex.quote(relative_path(self.run_dir))
            hint = f"; try: gptddp sample {run}" if run else ""
            screen.event(f"succeeded in {units.duration(round(elapsed_s))}{hint}")
            return SUCCEEDED
        screen.event("stopped; the same command continues it")
        return INTERRUPTED


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically: a reader sees the old content or the new.

    Without fsync, which can take seconds during a checkpoint and would delay a pod's restart.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, "utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
