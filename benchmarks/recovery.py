"""From a kill to the next new step: our launcher compared with stock torchrun.

    python benchmarks/recovery.py [--rounds 3] [--limit 90]

Four agents on this machine, each with its own address, train the same small model with the same
trainer and a checkpoint every ten seconds. Three kills alternate: a worker process; a pod (the
agent and its descendants); the pod with the endpoint. Every agent that exits is started again at
once. The stock job has torchrun's default rendezvous settings, but 100 restarts: with the default
of none the first kill ends it. It measures the seconds to the next new step, of any number of
ranks, and to the first of all four. A job that exceeds the limit is replaced for the next kill.
"""

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gptddp.run.history import last_step, logged, read_ledger

PODS = 4
MODEL = "--n-layer 2 --n-head 2 --n-embd 32 --seq-len 32 --lanes 8 --batch 8 --micro-batch 2"
TRAIN = f"{MODEL} --precision fp32 --device cpu --steps 1000000 --eval-every 1000000"
TRAIN += " --eval-tokens 512 --cache-dir none --checkpoint-every 10 --log-every 1000000"
START_S = 180.0  # for the first step of a job
CALM_S = 3.0  # before each kill


def tree(pid: int) -> list[int]:
    """A process and its descendants."""
    found = [pid]
    for parent in found:
        try:
            text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        except OSError:
            continue
        found += map(int, text.split())
    return found


def worker_of(pid: int) -> int:
    """The training process of a pod: the descendant of its main process with the most memory."""
    return max(tree(pid)[1:], key=lambda p: int(Path(f"/proc/{p}/statm").read_text().split()[1]))


class Job:
    """Agents that are started again as soon as they exit."""

    def __init__(self, kind: str, folder: Path, data: Path) -> None:
        self.kind, self.folder, self.run = kind, folder, folder / "run"
        self.args = [*TRAIN.split(), "--data", str(data), "--run-dir", str(self.run)]
        self.net = f"127.{40 + (kind == 'stock')}.{int(time.time()) % 250 + 1}"
        self.pods: dict[int, subprocess.Popen] = {}
        self.keep()

    def command(self, i: int) -> list[str]:
        if self.kind == "ours":
            return [sys.executable, "-m", "gptddp.launch", *self.args]
        return [
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes=1:{PODS}",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.net}.100:29411",
            "--rdzv-id=stock",
            f"--rdzv-conf=is_host={int(i == 0)}",
            "--max-restarts=100",
            f"--local-addr={self.net}.{100 + i}",
            "-m",
            "gptddp.train",
            *self.args,
        ]

    def keep(self) -> None:
        """Start the agents that do not run."""
        for i in range(PODS):
            if i in self.pods and self.pods[i].poll() is None:
                continue
            ours = (
                {
                    "POD_NAME": f"pod-{i}",
                    "POD_ADDRESS": f"{self.net}.{100 + i}",
                    "PET_NNODES": f"1:{PODS}",
                    "PET_NPROC_PER_NODE": "1",
                    "PET_RDZV_ID": "ours",
                    "PET_RDZV_ENDPOINT": f"{self.net}.100:29411",
                }
                if self.kind == "ours"
                else {}
            )
            env = os.environ | ours | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            with open(self.folder / f"{i}.log", "ab") as log:
                self.pods[i] = subprocess.Popen(
                    self.command(i), env=env, stdout=log, stderr=log, start_new_session=True
                )

    def kill_pod(self, i: int) -> None:
        for pid in tree(self.pods[i].pid):
            kill(pid)
        self.pods[i].wait()
        for path in (self.folder / f"shm-{i}").iterdir():
            path.unlink()  # a new pod has new memory

    def kill_worker(self, i: int) -> None:
        kill(worker_of(self.pods[i].pid))

    def close(self) -> None:
        for pid in [pid for pod in self.pods.values() for pid in tree(pod.pid)]:
            kill(pid)
        for pod in self.pods.values():
            pod.wait()

    def wait_for(
        self, since: float, timeout_s: float, *, smaller: bool = False, life: int = 0
    ) -> float | None:
        """The time of the first step of all ranks after `since`; None: too late.

        `smaller`: also a step of fewer ranks; a step of all ranks counts only after life `life`.
        """
        while time.time() < since + timeout_s:
            self.keep()
            for generation, line in logged(self.run, self.last() - 200):
                whole = line["world_size"] == PODS and (not smaller or generation > life)
                if line["time"] > since and (whole or (smaller and line["world_size"] < PODS)):
                    return float(line["time"])
            time.sleep(0.05)
        return None

    def last(self) -> int:
        return last_step(self.run) if self.run.exists() else 0

    def measure(self, harm: Callable[["Job"], None], limit_s: float) -> list[float] | None:
        """Seconds to the next new step, seconds to one of all ranks, number of repeated steps."""
        time.sleep(CALM_S)
        if self.wait_for(time.time(), START_S) is None:
            return None
        events, began = read_ledger(self.run), time.time()
        harm(self)
        life = max(event["generation"] for event in events)
        first = self.wait_for(began, limit_s, smaller=True, life=life)
        all_back = first and self.wait_for(first, limit_s)
        if not first or not all_back:
            return None
        new = read_ledger(self.run)[len(events) :]
        redone = sum(event["redo"] for event in new if event["event"] == "start")
        return [first - began, all_back - began, redone]


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


KILLS: dict[str, Callable[[Job], None]] = {
    "a worker": lambda job: job.kill_worker(3),
    "a pod": lambda job: job.kill_pod(2),
    "the endpoint's pod": lambda job: job.kill_pod(0),
}


def prepare(folder: Path) -> Path:
    """Some files of the standard library as a dataset."""
    source = folder / "source"
    source.mkdir()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-d]*.py")):
        (source / path.name).write_bytes(path.read_bytes())
    command = [sys.executable, "-c", "from gptddp.cli import cli; cli()", "prepare", str(source)]
    command += ["--out", str(folder / "data"), "--vocab-size", "512"]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "data"


def rounds(kind: str, folder: Path, data: Path, count: int, limit_s: float) -> None:
    """Do every kill `count` times, and print the costs."""
    results: dict[str, list[list[float] | None]] = {name: [] for name in KILLS}
    job = None
    try:
        for n, name in [(n, name) for n in range(count) for name in KILLS]:
            if job is None:
                job = Job(kind, folder / f"{kind}-{n}-{len(results[name])}-{name[-4:]}", data)
            results[name].append(job.measure(KILLS[name], limit_s))
            if results[name][-1] is None:
                job.close()
                job = None
    finally:
        if job:
            job.close()
    for name, found in results.items():
        good = [it for it in found if it]
        words = " ".join(f"{it[0]:.1f}/{it[1]:.1f}" if it else f">{limit_s:g}" for it in found)
        first, whole, redone = map(statistics.median, zip(*good, strict=True)) if good else [0] * 3
        text = f"{first:5.1f} s, of all {whole:5.1f} s, again {redone:4} steps"
        print(f"{kind:6} {name:20} {text if good else 'none recovered'}   ({words})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=90.0, help="seconds to wait for a recovery")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = prepare(Path(folder))
        for kind in ("ours", "stock"):
            rounds(kind, Path(folder), data, args.rounds, args.limit)


if __name__ == "__main__":
    main()
