"""Real launchers for tests, as the operator would start them, one on each loopback address."""

import json
import os
import time
from pathlib import Path
from typing import Any

from support.forked import Forked, fork, train
from support.paths import SUPPORT
from support.toy import SMALL
from support.waiting import PATIENCE_S, until

from gptddp.run.history import history

TOY = SUPPORT / "toy_worker.py"
START = (
    "import sys; from gptddp.launch.launcher import main; "
    "from gptddp.distributed.process import exit_now; exit_now(main(sys.argv[2:], sys.argv[1]))"
)
QUICK = (  # a new server imports only what the toy needs
    "from gptddp.launch import forkserver; forkserver.PRELOAD[1:] = []; "
)
PORT = 23111  # of the launchers
KEY = "launchers" * 8
TOY_FLAGS = ("--steps", "1000000")
RATE = ("--final-lr", "1")  # the same rate in a run of any length


class Job:
    """`pods` launchers as the operator would start them, each on its address of 127.0.0.0/8."""

    grace_s = 20

    def __init__(
        self, folder: Path, pods: int, slot: int, fewest: int, script: Path = TOY, *flags: str
    ) -> None:
        self.folder, self.slot, self.nnodes = folder, slot, f"{fewest}:{pods}"
        self.script, self.flags = script, flags or TOY_FLAGS
        self.size, self.before = pods, ""  # code that each launcher runs first
        self.prefix = f"127.{10 + os.getpid() % 200}.{slot}"  # no other test run has this address
        self.pods: dict[int, Forked] = {}
        folder.mkdir()

    def start(self, *indices: int) -> None:
        """Start these pods; each writes to `pod-<index>.log`."""
        ours = ("PET_", "POD_", "GPTDDP_")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        for i in indices:
            env = {
                "POD_NAME": f"pod-{i}",
                "POD_ADDRESS": f"{self.prefix}.{100 + i}",
                "PET_NPROC_PER_NODE": "1",
                **self.operator_env(i),
                "GPTDDP_RENDEZVOUS_KEY": KEY,
                "GPTDDP_GRACE_S": str(self.grace_s),
            }
            code = (QUICK if self.script == TOY else "") + self.before + START
            given = (str(self.script), "--run-dir", str(self.folder), *self.flags)
            log = self.folder / f"pod-{i}.log"
            self.pods[i] = fork(code, *given, env=clean | env, stderr=log)

    def operator_env(self, i: int) -> dict[str, str]:
        """The environment variables by which the operator tells pod `i` about the others."""
        return {
            "PET_NNODES": self.nnodes,
            "PET_RDZV_BACKEND": "c10d",
            "PET_RDZV_ENDPOINT": f"{self.prefix}.100:{PORT}",
            "PET_RDZV_ID": f"job-{self.slot}",
        }

    def steps(self) -> list[dict[str, Any]]:
        log = self.folder / "steps.jsonl"
        text = log.read_text() if log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]

    def worker(self, i: int) -> int:
        return int((self.folder / f"pod-{i}.pid").read_text())

    def order(self, i: int, what: str) -> None:
        (self.folder / f"pod-{i}.{what}").touch()

    def log(self, i: int) -> str:
        return (self.folder / f"pod-{i}.log").read_text()

    def whole(self) -> None:
        """Start the pods that are not running, and wait for a step of all pods together."""
        self.start(
            *(i for i in range(self.size) if i not in self.pods or self.pods[i].poll() is not None)
        )
        self.goes_on(self.size)

    def goes_on(self, world_size: int) -> None:
        """Wait for a step of this many workers, from now on."""
        now = time.time()
        until(
            lambda: any(
                line["time"] > now and line["world_size"] == world_size
                for line in self.steps()[-9:]
            ),
            f"a step of {world_size}",
        )

    def exit_code(self, i: int) -> int:
        return self.pods[i].wait(PATIENCE_S)

    def close(self) -> None:
        for pod in self.pods.values():
            pod.kill()
            pod.wait()


class Training(Job):
    """The trainer itself, with the faults that files order: see `faulty_worker.py`."""

    def __init__(
        self, folder: Path, corpus: Path, pods: int, slot: int, fewest: int, *flags: str
    ) -> None:
        script = SUPPORT / "faulty_worker.py"
        fixed = ("--data", str(corpus), "--eval-every", "1000000", *SMALL, *RATE)
        super().__init__(folder, pods, slot, fewest, script, *fixed, *flags)

    def steps(self) -> list[dict[str, Any]]:
        return list(history(self.folder))

    def order(self, i: int, what: str, step: str = "") -> None:
        (self.folder / f"pod-{i}.{what}").write_text(step)

    def finish(self, code: int = 0) -> list[dict[str, Any]]:
        """The lines of the log, when all pods have ended with this code."""
        codes = [self.exit_code(i) for i in self.pods]
        assert codes == [code] * self.size, "\n".join(map(self.log, self.pods))
        return self.steps()


def undisturbed(folder: Path, corpus: Path, world: int, steps: int) -> list[dict[str, Any]]:
    """The log of the same run without any fault, with `world` ranks."""
    flags = ["--data", str(corpus), "--run-dir", str(folder), "--steps", str(steps), *RATE]
    train(world, *SMALL, *flags, "--eval-every", "1000000")
    return list(history(folder))
