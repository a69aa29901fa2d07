"""Local pods: one process each, started and ended like a container by the kubelet."""

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptddp.errors import ConfigError, visible
from gptddp.k8s.local import container, reaper
from gptddp.k8s.local.container import Network
from gptddp.k8s.local.screen import end_of
from gptddp.k8s.objects import Object, replica_count, worker_pod_spec, worker_spec
from gptddp.k8s.render import quantity

_POD_MAIN = str(Path(__file__).with_name("pod_main.py"))


def utc_now() -> str:
    """The current time in Kubernetes' format: UTC, whole seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@dataclass(frozen=True)
class Plan:
    """Everything needed to start a pod; computed and checked before the first pod starts."""

    job: Object
    index: int
    address: str
    argv: list[str]
    env: dict[str, str]
    folders: list[Path]  # created if missing
    scratch: Path  # the pod's emptyDirs, removed with the pod
    cpus: str  # comma-separated

    @property
    def grace_s(self) -> float:
        return float(worker_pod_spec(self.job).get("terminationGracePeriodSeconds", 30))

    def option(self, flag: str) -> str | None:
        """The value of an option, which a manifest gives as `--x v`; None: none."""
        return self.argv[self.argv.index(flag) + 1] if flag in self.argv[:-1] else None


def plan(
    job: Object, network: Network, scratch: Path, volumes: Mapping[str, Path], key: str = ""
) -> list[Plan]:
    """A plan for every pod. Raises ConfigError for pods that cannot run.

    `volumes`: folders by volume name; `key`: the key that the job's Secret has on a cluster.
    """
    plans: list[Plan] = []
    cores, gpus = sorted(os.sched_getaffinity(0)), _gpu_names()
    next_core = next_gpu = 0
    limits = (container.container_of(job).get("resources") or {}).get("limits") or {}
    for index in range(replica_count(worker_spec(job))):
        own = scratch / f"worker-{index}"
        mounts = container.mounts(job, volumes, own)
        env = container.environment(job, index, network, mounts, key)
        count = math.ceil(quantity.number(limits.get("cpu")) or len(cores))
        cpus = {cores[(next_core + k) % len(cores)] for k in range(count)}
        wanted = sum(int(n) for name, n in limits.items() if "gpu" in name)
        next_core, next_gpu = next_core + count, next_gpu + wanted
        # A device plugin shows a container only the devices that it requested.
        env.setdefault("CUDA_VISIBLE_DEVICES", ",".join(gpus[next_gpu - wanted : next_gpu]))
        argv = container.command(job, mounts, env)
        cpu_list, address = ",".join(map(str, sorted(cpus))), network.address(index)
        plans.append(Plan(job, index, address, argv, env, [*mounts.values()], own, cpu_list))
    if next_gpu > len(gpus):
        raise ConfigError(
            f"the pods need {next_gpu} GPUs and this machine has {len(gpus)}: "
            "use fewer --replicas, or --gpus 0"
        )
    return plans


def _gpu_names() -> list[str]:
    """The GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    with contextlib.suppress(OSError):
        return [str(index) for index in range(len(os.listdir("/proc/driver/nvidia/gpus")))]
    return []


class Pod:
    """One pod: at most one process at a time, its log and its phase."""

    def __init__(self, plan: Plan, log: Path, job_tag: str) -> None:
        self.plan, self.log = plan, log
        self.name = container.name_of(plan.job, plan.index)
        self.tag = f"{job_tag}worker-{plan.index}/"
        self.phase = "Pending"
        self.process: subprocess.Popen[bytes] | None = None
        self.fd = -1  # readable once the process has ended; -1: none
        self.log_start = 0  # offset of the newest process's first line in the log
        self.start_at = 0.0  # earliest time of the next start; inf: never
        self.deadline = math.inf  # of a graceful stop
        self.exit_code: int | None = None
        self.started, self.started_text = -math.inf, ""
        self.ending = False  # asked to stop: not replaced, whatever its exit code

    @property
    def alive(self) -> bool:
        return self.process is not None

    @property
    def waiting(self) -> bool:
        """Will it be started later?"""
        return self.process is None and math.isfinite(self.start_at)

    @property
    def due(self) -> float:
        """Time of the next action: the start of the next process, or SIGKILL."""
        return self.deadline if self.process else self.start_at

    def start(self, now: float) -> None:
        """Start the container's process. Raises OSError if the machine cannot."""
        self.started, self.started_text, self.start_at = now, utc_now(), math.inf
        for folder in self.plan.folders:
            folder.mkdir(parents=True, exist_ok=True)
        env = {**self.plan.env, reaper.TAG: self.tag}
        pod_main = [sys.executable, "-I", "-S", _POD_MAIN, str(os.getpid()), self.plan.cpus]
        with open(self.log, "ab") as log:
            self.log_start = log.tell()
            self.process = subprocess.Popen(
                [*pod_main, *self.plan.argv],
                env=env,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.phase, self.fd = "Running", -1
        with contextlib.suppress(OSError):  # an old kernel: the next tick notices its end
            self.fd = os.pidfd_open(self.process.pid)

    def poll(self) -> int | None:
        """The exit code once the main process has ended (128 + n for signal n), else None.

        Kills the pod's other processes before it reaps the main process: until then its pid, which
        names their session, cannot be reused.
        """
        if self.process is None:
            return None
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if os.waitid(os.P_PID, self.process.pid, flags) is None:
            return None
        reaper.sweep(self.tag, [self.process.pid])
        code = self.process.wait()
        if self.fd >= 0:
            os.close(self.fd)
        self.process, self.deadline = None, math.inf
        self.exit_code = 128 - code if code < 0 else code
        return self.exit_code

    def terminate(self, now: float) -> None:
        """SIGTERM to the main process, like the kubelet; `kill` it after `deadline`."""
        self.ending, self.start_at = True, math.inf
        if self.process and math.isinf(self.deadline):
            self.deadline = now + self.plan.grace_s
            os.kill(self.process.pid, signal.SIGTERM)  # Popen's own would reap it

    def kill(self) -> None:
        """SIGKILL to every process of the pod."""
        self.ending, self.start_at, self.deadline = True, math.inf, math.inf
        if self.process:
            os.kill(self.process.pid, signal.SIGKILL)
            reaper.sweep(self.tag, [self.process.pid], timeout_s=2.0)

    def recreate(self) -> None:
        """Plan another pod of the same name with empty scratch; at most one per second."""
        self.phase, self.start_at = "Pending", self.started + 1.0
        self.wipe()

    def wipe(self) -> None:
        """Remove the emptyDirs."""
        shutil.rmtree(self.plan.scratch, ignore_errors=True)

    def last_line(self) -> str:
        """The last line of the newest process, at most 500 characters."""
        lines = [line.strip() for line in end_of(self.log, 4096, self.log_start)]
        return next((visible(line[:500]) for line in reversed(lines) if line), "")

    def status(self) -> dict[str, Any]:
        """The pod's entry in `status.json`."""
        return {
            "phase": self.phase,
            "pid": self.process.pid if self.process else None,
            "address": self.plan.address,
            "startTime": self.started_text,
            "logStart": self.log_start,
            "exitCode": None if self.process else self.exit_code,
        }
