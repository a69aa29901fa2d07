"""A job whose pods a test starts, kills, holds back and measures.

The pods are those of `gptddp-k8s submit --local`: from the rendered manifest, a process group each,
with their controller. Only the controller's loop is here: every wait of a test calls its `tick`.
"""

import contextlib
import dataclasses
import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.launchers import START
from support.owned import check_owners
from support.paths import SUPPORT
from support.processes import alive
from support.same_bits import check_same_bits
from support.toy import SMALL

from gptddp.k8s.local import pods, reaper
from gptddp.k8s.local.container import Network
from gptddp.k8s.local.controller import Controller
from gptddp.k8s.render import manifest, spec
from gptddp.run.history import history, last_step, read_ledger

ENTRY = [sys.executable, "-c", START, str(SUPPORT / "slow_worker.py")]
KEY = "faults" * 8
PAUSE_S = 0.1  # nearly all of a step's time
# Flags of every job, unless it has others: it ends with its test, and the rate is constant.
FLAGS = ("--steps", "1000000", "--final-lr", "1", "--eval-every", "5000")
FLAGS += ("--checkpoint-every", "3600")
SHORT = bool(os.environ.get("SHORT"))  # fewer repetitions, and no rows of long tests
long = pytest.mark.skipif(SHORT, reason="only in the full `make test-faults`")


@dataclasses.dataclass
class Fault:
    """The cost of one fault. Seconds do not include the time of the step itself."""

    seconds: float = math.nan  # from the harm to the next new step
    back_s: float = math.nan  # between the last step without the lost rank and the first with it
    redone: int = 0  # steps that were done before the fault and again after it
    lives: int = 0  # lives of the run that began


class Job:
    """The pods of one job: `size` of them, of which `fewest` continue alone.

    `runs`: the folder with the run directory, if another job shares it.
    """

    def __init__(
        self,
        folder: Path,
        corpus: Path,
        *flags: str,
        size: int = 4,
        fewest: int = 1,
        per_pod: int = 1,
        pause_s: float = PAUSE_S,
        network: Network | None = None,
        within: Callable[[int], list[str]] = lambda i: [],
        runs: Path | None = None,
        key: str = KEY,
        **env: str,
    ) -> None:
        self.size, self.born, self.one_clock = size, time.monotonic(), True
        runs = runs or folder / "runs"
        self.folder, self.run, self.orders = folder, runs / "gptddp", folder / "orders"
        self.orders.mkdir(parents=True)
        (folder / "logs").mkdir()
        self.pause(pause_s)
        options = {"replicas": size, "min": fewest, "nproc_per_node": per_pod}
        self.data, self.flags = corpus, (*FLAGS, *flags)
        built = manifest.objects(spec.load(None, options, [*SMALL, *self.flags]))[-1]
        self.network = network or Network(f"127.{10 + os.getpid() % 200}.{_slot()}", 23000)
        volumes = {"data": corpus, "runs": runs}
        plans = pods.plan(built, self.network, folder / "pods", volumes, key)
        self.tag = f"{folder}#{uuid.uuid4().hex}/"
        self.pods = [
            pods.Pod(
                dataclasses.replace(
                    p,
                    argv=[*within(i), *ENTRY, *p.argv[3:]],  # in place of python -m gptddp.launch
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
        """Make each step take so much longer."""
        self.pause_s = seconds
        (self.orders / "pause.new").write_text(str(seconds))
        (self.orders / "pause.new").rename(self.orders / "pause")

    def kill(self, *which: int, back_s: float = 0.0) -> None:
        """Send SIGKILL to every process of these pods; each pod comes back after `back_s`."""
        for i in which:
            self.back_at[i] = time.monotonic() + back_s
            os.killpg(self.pid(i), signal.SIGKILL)
            for pid in reaper.members(self.pods[i].tag):  # a saver has a session of its own
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def hold(self, *which: int) -> None:
        """Keep these pods from starting until they are brought back."""
        for i in which:
            self.back_at[i] = self.pods[i].start_at = math.inf

    def stop(self, *which: int) -> None:
        """Send SIGTERM to these pods, as if they were scaled away."""
        for i in which:
            self.back_at[i] = math.inf
            os.kill(self.pid(i), signal.SIGTERM)

    def bring_back(self, *which: int) -> None:
        """Let these pods, which were held back, start once they have ended."""
        for i in which:
            self.until(lambda pod=self.pods[i]: pod.process is None)
            self.back_at[i] = self.pods[i].start_at = 0.0

    def order(self, i: int, place: str) -> Path:
        """Have a pod killed when its worker gets to `place`; the returned file appears then."""
        done = self.orders / f"{i}.{place}.done"
        done.unlink(missing_ok=True)
        done.with_suffix("").touch()
        return done

    def kill_at(self, place: str) -> None:
        """Have only the first pod killed whose worker gets to a place."""
        done = [self.order(i, place) for i in range(self.size)]
        self.until(lambda: any(it.exists() for it in done), what=f"a pod's end at {place}")
        for it in done:
            it.with_suffix("").unlink(missing_ok=True)

    def pid(self, i: int) -> int:
        """The pod's main process, the launcher, as soon as it runs."""
        self.until(lambda: self.pods[i].process)
        return self.pods[i].process.pid  # type: ignore[union-attr]

    def worker(self, i: int, local: int = 0) -> int:
        """The pod's training process, as soon as it is alive."""

        def its() -> int | None:
            with contextlib.suppress(OSError, ValueError):  # not there, or being written
                pid = int((self.orders / f"{i}.{local}.pid").read_text())
                return pid if os.getsid(pid) == self.pid(i) and alive(pid) else None
            return None

        return int(self.until(its, what=f"a worker of pod {i}"))

    def workers(self) -> dict[int, int]:
        """The training processes of the pods that run, by pod."""
        return {i: self.worker(i) for i, pod in enumerate(self.pods) if pod.process}

    def shoot(self, i: int, local: int = 0) -> None:
        """Send SIGKILL to a worker process alone."""
        os.kill(self.worker(i, local), signal.SIGKILL)

    # -- what it sees ----------------------------------------------------------------------------

    def tick(self) -> None:
        self.controller.tick(time.monotonic())
        for i, back_at in self.back_at.items():
            if self.pods[i].process is None and self.pods[i].start_at < back_at:
                self.pods[i].start_at = back_at
        time.sleep(0.02)

    def until(self, true: Callable[[], Any], timeout_s: float = 180.0, what: str = "") -> Any:
        """Tick the controller until a true value, and return it. A timeout shows all logs."""
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
        there = [(i, pod.log) for i, pod in enumerate(self.pods) if pod.log.exists()]
        texts = [f"--- {i}\n{log.read_text()[-1500:]}" for i, log in there]
        return "\n".join([*self.events, *texts])

    def lines(self, first: int | None = None) -> list[dict[str, Any]]:
        """The log lines of the run's steps in order, from `first` on."""
        return list(history(self.run, first)) if self.run.exists() else []

    def last(self) -> int:
        """The last step that the log has."""
        return last_step(self.run) if self.run.exists() else 0

    def steady(self, world: int | None = None, steps: int = 3) -> None:
        """Wait for `steps` more steps of `world` ranks; None: of as many as there are pods."""
        last, size = self.last(), world or self.size

        def more() -> bool:
            return sum(line["world_size"] == size for line in self.lines(last + 1)) >= steps

        self.until(more, what=f"{steps} steps of {size} ranks")

    def step_s(self) -> float:
        """The median time of recent steps."""
        times = [line["time"] for line in self.lines(self.last() - 20)]
        return statistics.median(b - a for a, b in itertools.pairwise(times))

    def entered(self, step_s: float) -> float:
        """Seconds that the newest growth of the world has cost, beyond a step of `step_s`."""
        for after, before in itertools.pairwise(self.lines(self.last() - 500)[::-1]):
            if before["world_size"] < after["world_size"]:
                return max(0.0, after["time"] - before["time"] - step_s)
        return math.nan

    def longest_s(self, first: int) -> float:
        """The longest pause between two steps from this one on, beyond what a step takes."""
        times = [line["time"] for line in self.lines(first)]
        gaps = [b - a for a, b in itertools.pairwise(times)]
        return max(gaps) - statistics.median(gaps)

    def lives(self) -> list[dict[str, Any]]:
        """The starts of the run's lives, as the ledger has them."""
        return lives_in(read_ledger(self.run))

    def worlds(self) -> list[dict[str, Any]]:
        """The changes of the world, as the ledger has them."""
        return [event for event in read_ledger(self.run) if event["event"] == "world"]

    def lost(self, known: int) -> set[str]:
        """The pods that were lost in the changes of the world after the first `known`."""
        return {it["pod"] for event in self.worlds()[known:] for it in event["lost"]}

    def by_rank(self, rank: int) -> int:
        """The number of the pod that has this rank, where each has one worker."""

        def found() -> list[int]:
            files = {i: self.orders / f"{i}.0.rank" for i in self.workers()}
            return [i for i, it in files.items() if it.exists() and it.read_text() == str(rank)]

        return int(self.until(found, what=f"rank {rank}")[0])

    def saved(self) -> list[dict[str, Any]]:
        """The committed checkpoints, as the ledger has them."""
        events = read_ledger(self.run)
        return [it for it in events if it["event"] == "checkpoint" and "name" in it]

    @contextlib.contextmanager
    def fault(self, world: int | None = None, timeout_s: float = 120.0) -> Iterator[Fault]:
        """Do harm within it; then the seconds to the next new step of `world` ranks are known.

        They count from the entry, or from `began` (unix time) if the test sets that.
        """
        last, own_s = self.last(), self.step_s()
        events, fault, size = len(read_ledger(self.run)), Fault(), world or self.size
        self.began = time.time()
        yield fault

        def first() -> dict[str, Any] | None:
            new = self.lines(last + 1)
            return next(
                (it for it in new if it["world_size"] == size and it["time"] > self.began), None
            )

        line = self.until(first, timeout_s, f"a new step of {size} ranks")
        fault.seconds = max(0.0, line["time"] - self.began - own_s)
        starts = [e for e in read_ledger(self.run)[events:] if e["event"] == "start"]
        fault.redone, fault.lives = sum(e["redo"] for e in starts), len(lives_in(starts))

    # -- the end ---------------------------------------------------------------------------------

    def finish(self, timeout_s: float = 300.0) -> None:
        """Let the job end by itself, as fast as it can, or stop it; it must succeed."""
        self.pause(0)
        if self.flags.count("--steps") == 1:
            self.stop(*(i for i, pod in enumerate(self.pods) if pod.process))
            self.until(lambda: not any(pod.process for pod in self.pods), 60, "the end")
            return
        self.until(lambda: self.controller.conditions.has("Succeeded"), timeout_s, "success")
        self.until(lambda: self.controller.done, 90, "the end of all pods")

    def close(self) -> None:
        """End all processes of the job."""
        self.controller.kill()
        reaper.sweep(self.tag)
        for pod in self.pods:
            if pod.process:
                pod.process.wait()


_slots = iter(range(1, 250))


def _slot() -> int:
    return next(_slots)


def lives_in(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The starts of lives, without those of a new rank 0 within a life."""
    return [it for it in events if it["event"] == "start" and it["source"] != "memory"]


def check_same_run(job: Job, undisturbed: Path) -> None:
    """Assert that each step is there once, with the same bits, and that all checkpoints verify.

    If all pods have one clock, every rank-second must have an owner.
    """
    check_same_bits(job.run, undisturbed)
    if job.one_clock:
        check_owners(job.run, job.size * (time.monotonic() - job.born))
    command = [sys.executable, "-c", "from gptddp.cli import cli; cli()"]
    verify = [*command, "checkpoints", str(job.run), "--verify"]
    subprocess.run(verify, check=True, capture_output=True)
