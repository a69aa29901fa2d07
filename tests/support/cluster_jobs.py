"""A job on the cluster as its user sees it, and its run directory on the shared folder."""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.waiting import until

from gptddp.run.history import history, read_ledger

# `tiny` with shorter rows: a step of four ranks on two cores takes a few tenths of a second.
TINY = ["--preset=tiny", "--seq-len=64", "--precision=fp32", "--eval-tokens=512"]
TINY += ["--eval-every=100000", "--log-every=10"]
TINY += ["--threads=1"]  # the bits depend on it; pods have other CPUs than this machine

# Eight such pods fit on two nodes of two CPUs, beside the requests of the system's pods.
PODS = ["--data=data/corpus", "--cpu=400m", "--memory=1500Mi"]


def start(namespace: Any, *arguments: str) -> subprocess.Popen[str]:
    """`gptddp-k8s ARGUMENTS` in a namespace, as a process whose output is kept."""
    command = [sys.executable, "-c", "from gptddp.k8s import main; main()", arguments[0]]
    command += ["--namespace", namespace.namespace, *arguments[1:]]
    env = os.environ | {"KUBECONFIG": str(namespace.kubeconfig)}
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, env=env, text=True, **pipes)


def cli(namespace: Any, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    """`gptddp-k8s ARGUMENTS` to its end, which must have this exit code; None: any."""
    process = start(namespace, *arguments)
    out, err = process.communicate(timeout=400)
    assert code in (None, process.returncode), f"{arguments}: {process.returncode}\n{err}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


class Job:
    """The PyTorchJob of this name in a namespace that holds the claims `data` and `runs`."""

    def __init__(self, namespace: Any, name: str) -> None:
        self.namespace, self.name = namespace, name
        self.run: Path = namespace.shared / "runs" / name  # its run directory, seen from here

    # -- through the command line ------------------------------------------------------------

    def cli(
        self, command: str, *options: str, code: int | None = 0
    ) -> subprocess.CompletedProcess[str]:
        """`gptddp-k8s COMMAND NAME OPTIONS`, which must end with this exit code."""
        return cli(self.namespace, command, self.name, *options, code=code)

    def submit(self, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return cli(self.namespace, "submit", "--name", self.name, *options, code=code)

    def seen(self) -> dict[str, Any] | None:
        """The progress that `status` shows."""
        shown: dict[str, Any] = json.loads(self.cli("status", "-o", "json").stdout)
        return shown["progress"]

    # -- through the API ---------------------------------------------------------------------

    def pods(self) -> list[dict[str, Any]]:
        """Its pods, by index."""
        selector = f"training.kubeflow.org/job-name={self.name}"
        pods = self.namespace.get("pods", "-l", selector)
        return sorted(pods, key=lambda pod: str(pod["metadata"]["name"]))

    def pod(self, index: int) -> dict[str, Any]:
        name = f"{self.name}-worker-{index}"
        return next(pod for pod in self.pods() if pod["metadata"]["name"] == name)

    def node_of(self, index: int) -> str:
        return str(self.pod(index)["spec"]["nodeName"])

    def condition(self, kind: str) -> dict[str, Any] | None:
        """The job's condition of this type, if it is True."""
        job = self.namespace.get("pytorchjob", self.name)
        found = job.get("status", {}).get("conditions") or []
        return next((c for c in found if c["type"] == kind and c["status"] == "True"), None)

    # -- through its run directory -----------------------------------------------------------

    def lines(self) -> list[dict[str, Any]]:
        """The run's history: for each step the line of the last life that did it."""
        return list(history(self.run)) if self.run.exists() else []

    def lives(self) -> dict[int, list[dict[str, Any]]]:
        """Every life's own lines, by generation; an unfinished line is left out."""
        logs = {int(p.name.split(".")[1]): p for p in self.run.glob("log.*.jsonl")}
        return {
            generation: [
                json.loads(line)
                for line in logs[generation].read_text("utf-8").splitlines(keepends=True)
                if line.endswith("\n")
            ]
            for generation in sorted(logs)
        }

    def last_step(self) -> int:
        return max((line["step"] for life in self.lives().values() for line in life), default=0)

    def reach(
        self, step: int, world_size: int = 4, timeout_s: float = 120, after: int = 0
    ) -> dict[str, Any]:
        """The first step beyond `step` by a world of this size, in a life beyond `after`."""

        def done() -> dict[str, Any] | None:
            for generation, life in self.lives().items():
                for line in life:
                    enough = generation > after and line["step"] > step
                    if enough and line["world_size"] == world_size:
                        return line
            return None

        try:
            what = f"a step beyond {step} by {world_size} ranks"
            found: dict[str, Any] = until(done, what, timeout_s)
        except AssertionError as error:
            status = self.cli("status", code=None)
            raise AssertionError(f"{error}\n{status.stdout}{status.stderr}") from None
        return found

    # -- its faults --------------------------------------------------------------------------

    def worlds(self) -> list[dict[str, Any]]:
        """The ledger's changes of the world, oldest first."""
        return [event for event in read_ledger(self.run) if event["event"] == "world"]

    def rank_0(self) -> int:
        """The index of the pod that has rank 0."""
        worlds = self.worlds()
        return int(worlds[-1]["pods"][0].rpartition("-")[2]) if worlds else 0

    def gap_s(self, step: int) -> tuple[float, float]:
        """(seconds from this step to the next beyond a usual step, seconds of a usual step)."""
        times = {line["step"]: line["time"] for line in self.lines()}
        usual_s = statistics.median(
            times[it] - times[it - 1] for it in range(step - 9, step + 1) if it - 1 in times
        )
        return max(0.0, times[step + 1] - times[step] - usual_s), usual_s

    def recover(
        self, fault: Callable[[], Any], world_size: int = 4, timeout_s: float = 120
    ) -> "Recovery":
        """Do harm, and wait until `world_size` ranks continue to train.

        Only ranks of pods that were hit may be lost, and no life may begin.
        """
        before, known, at = self.workers(), len(read_ledger(self.run)), time.time()
        old = len(self.worlds())
        fault()

        def whole() -> list[dict[str, Any]] | None:
            new = self.worlds()[old:]
            done = new and new[-1]["world_size"] == world_size and any(it["lost"] for it in new)
            return new if done and self.last_step() > new[-1]["step"] else None

        try:
            what = f"{world_size} ranks that have gone on"
            events = until(whole, what, timeout_s, poll_s=0.1)
        except AssertionError as error:
            status = self.cli("status", code=None)
            raise AssertionError(f"{error}\n{status.stdout}{status.stderr}") from None
        lost = {it["pod"] for event in events for it in event["lost"]}
        after = self.workers()
        assert {pod: after.get(pod) for pod in before if pod not in lost} == {
            pod: before[pod] for pod in before if pod not in lost
        }, f"a pod that was not hit has another worker; lost: {lost}"
        starts = [it for it in read_ledger(self.run)[known:] if it["event"] == "start"]
        assert all(it["source"] == "memory" and not it["redo"] for it in starts), starts
        hit = [event for event in events if event["lost"]]
        back = [self.gap_s(event["step"])[0] for event in events if event["joined"]]
        seconds, step_s = self.gap_s(hit[0]["step"])
        return Recovery(
            seconds=seconds,
            step_s=step_s,
            pause_s=hit[0]["pause_s"],
            back_s=max(back, default=None),
            whole_s=events[-1]["time"] - at,
            lost=lost,
            events=events,
        )

    def kill(self, index: int, what: str) -> None:
        """SIGKILL for the launcher of a pod or for its worker.

        The container ends with its launcher, sometimes before the exit of `exec` is reported: then
        that is 137. The recovery, which must follow, shows that the process was killed.
        """
        python = ("--", "python", "-c", _KILL, what)
        done = self.namespace.kubectl("exec", f"{self.name}-worker-{index}", *python, check=False)
        assert done.returncode in (0, 137), done.stderr

    def force_delete(self, index: int) -> None:
        pod = f"pod/{self.name}-worker-{index}"
        self.namespace.kubectl("delete", pod, "--force", "--grace-period=0", "--wait=false")

    def settle(self, pods: int = 4, timeout_s: float = 300) -> None:
        """Wait for all nodes and ranks. A node that returns after long loses its pods then."""

        def calm() -> bool:
            nodes = [node["spec"] for node in self.namespace.get("nodes")]
            taints = [it for node in nodes for it in node.get("taints", [])]
            ends = [pod["metadata"].get("deletionTimestamp") for pod in self.pods()]
            return ends == [None] * pods and all(it["effect"] != "NoExecute" for it in taints)

        until(calm, f"{pods} pods on nodes that are ready", timeout_s)
        self.reach(self.last_step(), world_size=pods, timeout_s=timeout_s)

    def workers(self) -> dict[str, tuple[str, str]]:
        """The pid and start time of each running pod's worker, as its node sees them."""
        pods = {it["metadata"]["uid"]: it for it in self.pods()}
        found: dict[str, tuple[str, str]] = {}
        for node in {it["spec"].get("nodeName") for it in pods.values()} - {None}:
            command = ["docker", "exec", node, "sh", "-c", _PROCESSES]
            told = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
            stats = {
                line.split(" ", 1)[0]: line.rpartition(")")[2].split()
                for line in told.splitlines()
                if "/" not in line
            }
            of = dict(re.findall(r"^(\d+)/cgroup:pod(\S+)$", told, re.M))

            def depth(pid: str, of: Any = of, stats: Any = stats) -> int:
                """0: the first process of a container. Then come launcher, fork server, worker."""
                parent = stats[pid][1]
                is_inside = parent in stats and of.get(parent) == of[pid]
                return 1 + depth(parent) if is_inside else 0

            for pid, uid in of.items():
                pod = pods.get(uid.replace("_", "-"))
                if pod and pid in stats and depth(pid) == 3:
                    found[pod["metadata"]["name"]] = pid, stats[pid][19]
        return found


# Runs in a pod: kills the launcher (the child of the init process) or the training worker.
_KILL = """
import os, pathlib, signal, sys
def stat(pid):
    return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
pids = [int(p.name) for p in pathlib.Path("/proc").glob("[0-9]*") if int(p.name) != os.getpid()]
parents = {p: int(stat(p)[1]) for p in pids}
launcher = next(p for p in pids if parents[p] == 1)
worker = next(p for p in pids if parents.get(parents[p]) == launcher)  # of its fork server
os.kill(launcher if sys.argv[1] == "launcher" else worker, signal.SIGKILL)
"""

# Runs in a node: prints the uid of each process's pod, and /proc/PID/stat of all processes.
_PROCESSES = (
    "cd /proc; grep -o -m 1 'pod[0-9a-f]\\{8\\}[-_][-_0-9a-f]\\{27\\}' [0-9]*/cgroup 2>/dev/null;"
    " cat [0-9]*/stat 2>/dev/null"
)


@dataclass
class Recovery:
    """The cost of a fault. Seconds without a step do not include the usual time of a step."""

    seconds: float  # without a step, after ranks were lost
    pause_s: float  # by the ledger: from the notice of the loss until the ranks continued
    step_s: float  # the usual time of a step before
    back_s: float | None  # without a step, after ranks came back, at most; None: none did
    whole_s: float  # from the fault until the expected number of ranks trained
    lost: set[str]  # pods
    events: list[dict[str, Any]]  # the changes of the world
