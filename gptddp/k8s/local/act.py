"""`logs`, `suspend`, `delete` and `sample` with --local."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from gptddp.errors import ConfigError
from gptddp.k8s.local import container, locks
from gptddp.k8s.local.paths import relative_path
from gptddp.k8s.local.screen import GrowingLog
from gptddp.k8s.local.seen import LocalJobs
from gptddp.k8s.objects import Object, short_name, worker_pod_spec
from gptddp.k8s.observe import facts, logs
from gptddp.k8s.observe.watcher import Say
from gptddp.k8s.render import code_volume

_POLL_S = 0.2


def show_logs(
    jobs: LocalJobs,
    name: str,
    write: Callable[[str], None],
    *,
    index: int | None,
    tail: int | None,
    follow: bool,
) -> None:
    """Write the logs of a job's pods, one after the other; with `follow`, until the job ends.

    A pod's file has the lines of all pods of its name, without times.
    """
    found = facts.of_job(jobs, name)
    logs.check_index(found, index)
    opened = {
        short_name(pod): GrowingLog(jobs.log_of(pod["metadata"]["name"]))
        for pod in logs.of_index(found.pods, index)
    }
    while True:
        goes_on = follow and locks.is_running(jobs.jobs / name)
        for prefix, log in opened.items():
            for line in deque(log.lines(rest=not goes_on), maxlen=tail):
                write(line if index is not None else f"[{prefix}] {line}")
        if not goes_on:
            return
        tail = None  # later lines are all new
        time.sleep(_POLL_S)


def suspend(jobs: LocalJobs, name: str, say: Say) -> str:
    """End the pods of a job like Ctrl-C at its `submit`: they commit a checkpoint."""
    jobs.job(name)
    if not _stop(jobs.jobs / name, say):
        say("the job is not running")
        return f"local job {name} unchanged"
    say("the same `submit --local` continues it from its checkpoint")
    return f"local job {name} suspended"


def _stop(folder: Path, say: Say) -> bool:
    """Let the runner end its pods, and wait until all have ended; False if the job did not run."""
    if not locks.is_running(folder):
        return False
    say("waiting for its pods to end; a pod commits a checkpoint first")
    if runner := locks.holder(folder):
        with contextlib.suppress(ProcessLookupError):  # it was killed: its reaper ends the pods
            os.kill(runner, signal.SIGTERM)
    while locks.is_running(folder):
        time.sleep(_POLL_S)
    return True


def delete(jobs: LocalJobs, name: str, say: Say) -> str:
    """End a job, and remove its runner's files from its folder; its volumes stay."""
    folder, run = jobs.jobs / name, locks.status(jobs.jobs / name).get("run")
    if not (folder / "manifest.yaml").exists():  # an unreadable manifest is deleted as well
        raise jobs.not_found(name)
    _stop(folder, say)
    if (lock := locks.lock(folder)) is None:
        raise ConfigError(f"the job {name} was started again meanwhile: nothing was deleted")
    for part in ("pods", "logs", "code"):
        shutil.rmtree(folder / part, ignore_errors=True)
    for part in ("status.json", "manifest.yaml", "lock"):
        (folder / part).unlink(missing_ok=True)
    os.close(lock)
    with contextlib.suppress(OSError):  # the folder has other files
        folder.rmdir()
    stays = f"run directory stays: {relative_path(run)}" if run else "volumes stay"
    say(f"its {stays}; the same submit continues from there")
    return f"local job {name} deleted"


def sample(jobs: LocalJobs, name: str, options: Sequence[str]) -> int:
    """Run `gptddp sample` on the run of a job, with the job's own code; returns the exit code."""
    job = jobs.job(name)
    folder = jobs.jobs / name
    run = (status := locks.status(folder)).get("run")
    if not status:
        where = relative_path(folder / "status.json")
        raise ConfigError(f"{where} cannot be read: the same `submit --local` writes it again")
    if not run:
        raise ConfigError(f"the job {name} has no --run-dir, and so no checkpoint to sample from")
    return subprocess.run(
        [*_on_code(job, folder), "gptddp", "sample", run, *options], env=container.machine_env()
    ).returncode


def _on_code(job: Object, folder: Path) -> list[str]:
    """The words before a program that make it run with the job's own code."""
    words = code_volume.before_command(worker_pod_spec(job))
    return [container.localized(word, {code_volume.MOUNT: folder / "code"}) for word in words]
