"""Goodput of a job whose pods and workers are killed again and again.

    python benchmarks/soak.py [--every 120] [--minutes 10] [--dir .bench]

Four local pods train the model `tiny` on the Python source on this machine, prepared like the
demo's dataset. At each interval a random pod, or only its training process, is killed. Goodput is
the seconds of steps that count divided by the elapsed seconds, both from the run's log, between the
first step and the last; the lost time is split by the ledger's `world` events.
"""

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

from recovery import worker_of

from gptddp.demo import prepare
from gptddp.files import read_json
from gptddp.run.history import history, read_ledger

PODS = 4


def kill_one(folder: Path, rng: random.Random) -> str:
    """Kill a pod or its worker; return a text: its name, or the reason why it failed."""
    index, what = rng.randrange(PODS), rng.choice(["pod", "worker"])
    pods = (read_json(folder / "jobs/soak/status.json") or {}).get("pods", {})
    try:
        pid = pods[f"soak-worker-{index}"]["pid"]
        if what == "pod":
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(worker_of(pid), signal.SIGKILL)
    except (KeyError, TypeError, ValueError, OSError) as error:
        return f"{what} {index} does not run ({error!r})"
    return f"{what} {index}"


def soak(folder: Path, every_s: float, seconds: float, seed: int) -> None:
    """Run the job for so long, with kills, then stop it by SIGINT."""
    rng, run = random.Random(seed), folder / "volumes/runs/soak"
    command = [sys.executable, "-c", "from gptddp.k8s import main; main()", "submit"]
    command += ["--name", "soak", "--replicas", str(PODS), "--local", "--local-dir", str(folder)]
    command += ["--", "--steps", "1000000", "--eval-every", "1000"]  # usually no evaluation
    with (folder / "job.log").open("wb") as log:
        job = subprocess.Popen(command, stderr=log)
        try:
            while not list(run.glob("log.*")):
                assert job.poll() is None, f"the job has ended: see {folder}/job.log"
                time.sleep(0.5)
            end = time.monotonic() + seconds
            while (left := end - time.monotonic()) > 0:
                time.sleep(min(every_s, left))
                if left > every_s:
                    print(f"{time.strftime('%X')} kill: {kill_one(folder, rng)}", flush=True)
            job.send_signal(signal.SIGINT)
            assert job.wait(120) == 130, f"the job did not stop cleanly: see {folder}/job.log"
        finally:
            if job.poll() is None:
                job.kill()  # its reaper ends the pods
                job.wait()


def report(run: Path) -> None:
    lines = list(history(run))
    steps = [line["step"] for line in lines]
    assert steps == list(range(1, len(lines) + 1)), "a step is missing in the log"
    kept = sum((now["tokens"] - last["tokens"]) / now["tok_s"] for last, now in pairwise(lines))
    elapsed = lines[-1]["time"] - lines[0]["time"]
    events = read_ledger(run)
    pauses = [event["pause_s"] for event in events if event["event"] == "world"]
    lives = sum(event["event"] == "start" for event in events)
    redone = sum(event["redo"] for event in events if event["event"] == "start")
    print(f"goodput         {kept / elapsed:.1%} of {elapsed / 60:.1f} minutes, {len(steps)} steps")
    print(f"generations     {lives}; steps done again: {redone}")
    lost = elapsed - kept
    print(f"lost            {lost:.1f} s, of which in {len(pauses)} pauses {sum(pauses):.1f} s")
    if pauses:
        print(f"  pause         median {statistics.median(pauses):.2f} s, max {max(pauses):.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=float, default=120.0, help="seconds between kills [120]")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--dir", type=Path, default=Path(".bench"), help="folder for its data")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.dir.mkdir(parents=True, exist_ok=True)
    prepare(args.dir / "volumes/data", packages=True)
    for old in ("volumes/runs/soak", "jobs/soak"):
        shutil.rmtree(args.dir / old, ignore_errors=True)
    soak(args.dir, args.every, 60 * args.minutes, args.seed)
    report(args.dir / "volumes/runs/soak")


if __name__ == "__main__":
    main()
