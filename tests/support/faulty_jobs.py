"""A job whose pods a test starts, kills, holds back and measures.

The pods are those of `gptddp-k8s submit --local`: the rendered manifest, a process group each, and
their controller. Only its loop is the test's: whatever waits here gives the controller its ticks.
"""

import contextlib
import dataclasses
import math
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.launchers import START
from support.measurements import recovery
from support.owned import check_owners
from support.paths import SUPPORT
from support.same_bits import check_same_bits
from support.toy import SMALL

from gptddp.k8s.local import pods, reaper
from gptddp.k8s.local.container import Network
from gptddp.k8s.local.controller import Controller
from gptddp.k8s.render import manifest, spec
from gptddp.run.history import logged, read_ledger

ENTRY = [sys.executable, "-c", START, str(SUPPORT / "slow_worker.py")]
KEY = "faults" * 8
PAUSE_S = 0.1  # what a step takes, nearly
SHORT = bool(os.environ.get("SHORT"))  # fewer repetitions, and the rows of minutes left out
long = pytest.mark.skipif(SHORT, reason="only in the full `make test-faults`")


@dataclasses.dataclass
class Fault:
    """What one fault has cost."""

    seconds: float = math.nan  # to the next new step
    redone: int = 0  # steps that were done before the fault, and again
    lives: int = 0  # of the run that began
    source: str = ""  # of the last one's state
    recovered: dict[str, Any] = dataclasses.field(default_factory=dict)  # its event in the ledger


class Job:
    """Pods of one job, `size` of them, of which `fewest` go on alone.

    `runs`: the folder of the run directory, where another job has it too.
    """

    def __init__(
        self,
        folder: Path,
        corpus: Path,
        *flags: str,
        size: int = 4,
        fewest: int = 1,
        pause_s: float = PAUSE_S,
        network: Network | None = None,
        within: Callable[[int], list[str]] = lambda i: [],
        runs: Path | None = None,
        **env: str,
    ) -> None:
        self.size, self.born = size, time.monotonic()
        runs = runs or folder / "runs"
        self.folder, self.run, self.orders = folder, runs / "gptddp", folder / "orders"
        self.orders.mkdir(parents=True)
        (folder / "logs").mkdir()
        self.pause(pause_s)
        options = {"replicas": size, "min": fewest}
        built = manifest.objects(spec.load(None, options, [*SMALL, *flags]))[-1]
        self.network = network or Network(f"127.{10 + os.getpid() % 200}.{_slot()}", 23000)
        volumes = {"data": corpus, "runs": runs}
        plans = pods.plan(built, self.network, folder / "pods", volumes, KEY)
        self.tag = f"{folder}#{uuid.uuid4().hex}/"
        self.pods = [
            pods.Pod(
                dataclasses.replace(
                    p,
                    argv=[*within(i), *ENTRY, *p.argv[3:]],  # for python -m gptddp.launch
                    env=p.env | env | {"FAULTS_DIR": str(self.orders)},
                ),
                folder / f"logs/{i}.log",
                self.tag,
            )
            for i, p in enumerate(plans)
        ]
        self.back_at: dict[int, float] = {}  # pods that are held back, and until when
        self.events: list[str] = []
        self.controller = Controller(built, self.pods, self.events.append)
        self.controller.create()

    # -- what a test does ------------------------------------------------------------------------

    def pause(self, seconds: float) -> None:
        """Each step takes so much longer."""
        (self.orders / "pause.new").write_text(str(seconds))
        (self.orders / "pause.new").rename(self.orders / "pause")

    def kill(self, *which: int, back_s: float = 0.0) -> None:
        """SIGKILL to every process of these pods; another of each comes after `back_s`."""
        for i in which:
            self.back_at[i] = time.monotonic() + back_s
            os.killpg(self.pid(i), signal.SIGKILL)

    def hold(self, *which: int) -> None:
        """These pods do not start until they are brought back."""
        for i in which:
            self.back_at[i] = self.pods[i].start_at = math.inf

    def stop(self, *which: int) -> None:
        """SIGTERM, as for pods that are scaled away."""
        for i in which:
            self.back_at[i] = math.inf
            os.kill(self.pid(i), signal.SIGTERM)

    def bring_back(self, *which: int) -> None:
        """Let pods start that were held back, when they have ended."""
        for i in which:
            self.until(lambda pod=self.pods[i]: pod.process is None)
            self.back_at[i] = self.pods[i].start_at = 0.0

    def order(self, i: int, place: str) -> Path:
        """Have the pod killed when its worker is there; the file that then appears."""
        done = self.orders / f"{i}.{place}.done"
        done.unlink(missing_ok=True)
        done.with_suffix("").touch()
        return done

    def pid(self, i: int) -> int:
        """The pod's main process, the launcher, as soon as it runs."""
        self.until(lambda: self.pods[i].process)
        return self.pods[i].process.pid  # type: ignore[union-attr]

    def worker(self, i: int) -> int:
        """The pod's training process."""
        return int((self.orders / f"{i}.pid").read_text())

    # -- what it sees ----------------------------------------------------------------------------

    def tick(self) -> None:
        self.controller.tick(time.monotonic())
        for i, back_at in self.back_at.items():
            if self.pods[i].process is None and self.pods[i].start_at < back_at:
                self.pods[i].start_at = back_at
        time.sleep(0.01)

    def until(self, true: Callable[[], Any], timeout_s: float = 180.0, what: str = "") -> Any:
        """The first true value; the controller works meanwhile. Fails with all logs in the end."""
        end = time.monotonic() + timeout_s
        while not (value := true()):
            self.tick()
            if time.monotonic() > end or self.controller.conditions.has("Failed"):
                raise AssertionError(f"{what} not within {timeout_s:g} s\n{self.logs()}")
        return value

    def wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end, seconds + 60)

    def logs(self) -> str:
        texts = [f"--- {i}\n{pod.log.read_text()[-1500:]}" for i, pod in enumerate(self.pods)]
        return "\n".join([*self.events, *texts])

    def lines(self) -> list[tuple[int, dict[str, Any]]]:
        """The run's steps in order, each with its generation."""
        return list(logged(self.run)) if self.run.exists() else []

    def steady(self, world: int | None = 4, steps: int = 4) -> None:
        """Wait for some more steps, of a world of that size."""
        last = self.lines()[-1][1]["step"] if self.lines() else 0

        def more() -> bool:
            new = [line for _, line in self.lines() if line["step"] > last]
            return sum(world in (None, line["world_size"]) for line in new) >= steps

        self.until(more, what=f"{steps} steps of {world} ranks")

    @contextlib.contextmanager
    def fault(
        self, world: int = 4, *, new_life: bool = True, timeout_s: float = 180.0
    ) -> Iterator[Fault]:
        """Do harm within; at the end the seconds to the next new step of so many ranks are known.

        They count from the entry, or from `began` seconds of unix time where harm sets that.
        """
        generation, last = next((g, line["step"]) for g, line in self.lines()[::-1])
        events, fault = len(read_ledger(self.run)), Fault()
        entry = self.began = time.time()
        yield fault

        def first() -> tuple[int, dict[str, Any]] | None:
            return next(
                (
                    (g, line)
                    for g, line in self.lines()
                    if line["step"] > last
                    and line["world_size"] == world
                    and line["time"] > self.began
                    and g >= generation + new_life
                ),
                None,
            )

        life, line = self.until(first, timeout_s, f"a new step of {world} ranks")
        fault.seconds = line["time"] - self.began
        starts = [e for e in read_ledger(self.run)[events:] if e["event"] == "start"]
        fault.redone, fault.lives = sum(e["redo"] for e in starts), len(starts)
        fault.source = starts[-1]["source"] if starts else ""
        if life > generation and self.began == entry:  # else it began long before the seconds do
            fault.recovered = self.until(lambda: recovery(self.run, life), 30, "its event")

    # -- the end ---------------------------------------------------------------------------------

    def finish(self, timeout_s: float = 300.0) -> None:
        """Let the job end by itself, as fast as it can; it must succeed."""
        self.pause(0)
        self.until(lambda: self.controller.conditions.has("Succeeded"), timeout_s, "success")
        self.until(lambda: self.controller.done, 90, "the end of all pods")

    def close(self) -> None:
        """Nothing of the job is left."""
        self.controller.kill()
        reaper.sweep(self.tag)
        for pod in self.pods:
            if pod.process:
                pod.process.wait()


_slots = iter(range(1, 250))


def _slot() -> int:
    return next(_slots)


def check_same_run(job: Job, undisturbed: Path) -> None:
    """Every step once, and the same bits in every number and tensor; every checkpoint verifies.

    And every rank-second has an owner.
    """
    check_same_bits(job.run, undisturbed)
    check_owners(job.run, job.size * (time.monotonic() - job.born))
    command = [sys.executable, "-c", "from gptddp.cli import cli; cli()"]
    verify = [*command, "checkpoints", str(job.run), "--verify"]
    subprocess.run(verify, check=True, capture_output=True)
