"""A job on the cluster as its user sees it, and its run directory on the shared folder."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.waiting import until

from gptddp.run.history import history

# `tiny` with shorter rows: a step of four ranks on two cores takes a few tenths of a second.
TINY = ["--preset=tiny", "--seq-len=64", "--precision=fp32", "--eval-tokens=512"]
TINY += ["--eval-every=100000", "--log-every=10"]
TINY += ["--threads=1"]  # of which the bits depend; pods have other CPUs than this machine

# Eight such pods fit on two nodes of two CPUs, beside what the nodes' own pods ask for.
PODS = ["--data=data/corpus", "--cpu=400m", "--memory=1500Mi"]


def start(namespace: Any, *arguments: str) -> subprocess.Popen[str]:
    """`gptddp-k8s ARGUMENTS` in a namespace, as a process whose output is kept."""
    command = [sys.executable, "-c", "from gptddp.k8s import main; main()", arguments[0]]
    command += ["--namespace", namespace.namespace, *arguments[1:]]
    env = os.environ | {"KUBECONFIG": str(namespace.kubeconfig)}
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, env=env, text=True, **pipes)


def cli(namespace: Any, *arguments: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
    """The same to its end; it must end with this exit code, None: with any."""
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
        """Every life's own lines, by generation; a line that is being written is left out."""
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

    def recover(
        self, fault: Callable[[], Any], world_size: int = 4, timeout_s: float = 120
    ) -> float:
        """Seconds from a fault to the next new step by a world of this size, in a later life."""
        at, before = time.time(), max(self.lives(), default=0)
        fault()
        until(lambda: max(self.lives()) > before, "a step of a new life", timeout_s)
        # What the old world still finished while the fault was on its way is not new.
        old = max(
            line["step"] for life, lines in self.lives().items() for line in lines if life <= before
        )
        return float(self.reach(old, world_size, timeout_s, after=before)["time"]) - at
