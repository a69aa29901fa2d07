"""The live screen of `status --watch`, and its stream of JSON."""

import contextlib
import json
import signal
import sys
import time
from collections.abc import Iterable
from io import StringIO
from typing import IO, cast

from rich.console import Console
from rich.live import Live

from gptddp.k8s import exit_codes
from gptddp.k8s.cli.command import note
from gptddp.k8s.cluster import Cluster
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.objects import Object, is_ready, started
from gptddp.k8s.observe import facts, frame, rank_0_log, status, why
from gptddp.k8s.observe.watcher import of_job
from gptddp.live import HZ, Patient

_POLL_S = 0.5  # between two polls of the pods alone: a lost pod is shown at once
_WIDE = 1000  # columns: wide enough to cut nothing
_CODES = {why.SUCCEEDED: exit_codes.SUCCEEDED, why.FAILED: exit_codes.FAILED}


def watch(cluster: Cluster, name: str, every_s: float) -> int:
    """Show a job until it ends; returns the exit code, as `wait`.

    Shows it once where stdout is no terminal. Raises NotFoundError, ClusterError.
    """
    view = _View(cluster, name)
    if not view.look():
        raise cluster.not_found(name)
    if not view.draws:
        view.leave()
        note("stdout is no live terminal, so the status is shown once; -o json repeats it as lines")
        return exit_codes.SUCCEEDED
    for number in (signal.SIGTERM, signal.SIGHUP):  # an exception restores the terminal
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    there = True
    try:
        with view.drawn():
            while there and view.state not in why.FINAL:
                view.wait(every_s)
                there = view.look()
    except KeyboardInterrupt:
        view.leave()
        raise
    view.leave()
    return _CODES[view.state] if there else exit_codes.GONE


def stream(cluster: Cluster, name: str, every_s: float) -> int:
    """Print the object of `status -o json`, one per line, every `every_s` until the job ends."""
    watcher = of_job(cluster, name, note)
    if (found := watcher.poll()) is None:
        raise cluster.not_found(name)
    while found:
        shown = status.describe(rank_0_log.with_log(cluster, found))
        print(json.dumps(shown), flush=True)
        if shown["state"] in _CODES:
            return _CODES[shown["state"]]
        time.sleep(every_s)
        found = watcher.poll()
    return exit_codes.GONE


class _View:
    """The newest status of the job, and the terminal that shows it."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.state = ""
        self._cluster, self._note = cluster, ""
        self._watcher = of_job(cluster, name, self._say)
        stream = Patient(sys.stdout)
        self.draws = stream.draws
        file = cast(IO[str], stream)
        self._console = Console(file=file, force_terminal=self.draws, highlight=False)

    def look(self) -> bool:
        """Fetch the job again, waiting while the API server is away; False: no such job."""
        if (found := self._watcher.poll()) is None:
            return False
        self._pods, self._job = _seen(found.pods), found.job
        found = rank_0_log.with_log(self._cluster, found)
        self._note, self._shown = "", status.describe(found)
        self.state = self._shown["state"]
        return True

    def _say(self, text: str) -> None:
        """Show with the status that the API server does not answer."""
        self._note = text

    def drawn(self) -> Live:
        """Show the newest status on the terminal's alternate screen, inside this context."""
        return Live(
            console=self._console,
            screen=True,
            refresh_per_second=HZ,
            redirect_stdout=False,
            redirect_stderr=False,
            get_renderable=lambda: frame.frame(
                self._console, self._shown, self._console.height, self._note
            ),
        )

    def leave(self) -> None:
        """Print the last status as plain, uncut lines that stay on the terminal."""
        lines = Console(file=StringIO(), width=_WIDE)
        lines.print(frame.frame(lines, self._shown, note=self._note))
        for line in cast(StringIO, lines.file).getvalue().splitlines():
            self._console.out(line.rstrip(), highlight=False)

    def wait(self, seconds: float) -> None:
        """Wait these seconds, or until a pod changes."""
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            time.sleep(min(_POLL_S, left_s))
            with contextlib.suppress(ClusterError):  # the next `look` reports it
                if _seen(facts.pods_of(self._cluster, self._job)) != self._pods:
                    return


def _seen(pods: Iterable[Object]) -> list[tuple[str, bool, float]]:
    """The values that change when a pod is lost or replaced."""
    return [(pod["metadata"]["name"], is_ready(pod), started(pod)) for pod in pods]
