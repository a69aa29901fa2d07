"""The demo: real text, four pods as processes, one of them killed, a sample at the end.

    python -m gptddp.demo

Every command that it runs is printed as a user would type it. The corpus is the Python source on
this machine: the standard library and the packages of the environment. All files are in `demo/`.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from gptddp.errors import GptddpError
from gptddp.files import read_json
from gptddp.run.directory import FINISHED
from gptddp.run.history import history, read_ledger

NAME = "demo"
VICTIM = f"{NAME}-worker-2"
# Generated code and tables: a client with a thousand similar classes, megabytes of numbers.
LEFT_OUT = ("kubernetes", "encodings", "pydoc_data", "test", "tests")


def say(text: str) -> None:
    print(f"\n\033[1m== {text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


def command(program: str, *args: str) -> list[str]:
    """A command of ours as it can be run here; printed as a user types it."""
    print(f"$ {program} {shlex.join(args)}", flush=True)
    module = "gptddp.k8s" if program == "gptddp-k8s" else "gptddp"
    return [sys.executable, "-c", f"from {module} import main; main()", *args]


def prepare(data: Path) -> None:
    """Prepare the corpus, unless an earlier demo has."""
    if (data / "dataset.json").exists():
        say(f"The corpus is prepared: {data}")
        return
    say("Preparing the corpus: the Python source on this machine")
    paths = sysconfig.get_paths()
    sources = list(dict.fromkeys([paths["stdlib"], paths["purelib"]]))
    left_out = [arg for pattern in LEFT_OUT for arg in ("--exclude", pattern)]
    subprocess.run(
        command(
            *("gptddp", "prepare", *sources, "--include", "*.py", *left_out),
            *("--vocab-size", "2048", "--out", str(data)),
        ),
        check=True,
    )


def last_line(run: Path) -> dict[str, Any]:
    """The newest finished step; empty before the first."""
    return max(history(run), key=lambda line: line["step"], default={})


def kill_at(step: int, run: Path, status: Path, job: subprocess.Popen[bytes]) -> float | None:
    """SIGKILL every process of one pod once the run has reached `step`; the time of the kill."""
    while job.poll() is None:
        time.sleep(0.2)
        if last_line(run).get("step", 0) < step:
            continue
        pid = ((read_json(status) or {}).get("pods", {}).get(VICTIM) or {}).get("pid")
        if pid is None:
            continue
        os.killpg(pid, signal.SIGKILL)
        say(f"kill -9 {VICTIM} (process {pid} and its children) at step {step}")
        return time.time()
    return None


def recovery(run: Path, killed: float) -> str:
    """Seconds from the kill to the next new step, and how many steps were done again."""
    starts = [event for event in read_ledger(run) if event["event"] == "start"]
    lives = [start for start in starts if start["time"] > killed]
    lines = [json.loads(line) for log in run.glob("log.*.jsonl") for line in log.open()]
    before = max((line["step"] for line in lines if line["time"] <= killed), default=0)
    world = max(start["world_size"] for start in starts)
    new = [line for line in lines if line["step"] > before]
    full = [line["time"] for line in new if line["world_size"] == world and line["time"] > killed]
    redo = sum(start["redo"] for start in lives)
    first = min(line["time"] for line in new)
    return (
        f"{first - killed:.1f} s from the kill to the next new step, {min(full) - killed:.1f} s to "
        f"the next one with {world} ranks; {redo} steps done again"
    )


def report(run: Path, data: Path, killed: float | None) -> bool:
    """Print the result as the run's own files have it; True if no step is missing or doubled."""
    last = last_line(run)
    manifest = read_json(data / "dataset.json") or {}
    entropy = manifest["splits"]["val"]["unigram_entropy_nats"]
    say("Result")
    print(
        f"validation loss  {last['val_loss']:.3f} nats a token "
        f"(unigram entropy of the text: {entropy:.3f})"
    )
    print(f"                 {last['val_bpb']:.3f} bits a byte")
    complete = [line["step"] for line in history(run)] == list(range(1, last["step"] + 1))
    print(
        f"steps            {last['step']}, {last['tokens'] / 1e6:.1f} M tokens; "
        f"{'none' if complete else 'SOME'} missing or doubled in the log"
    )
    print(f"data             chain of all batch fingerprints {last['chain_fp']}")
    if killed is not None:
        print(f"recovery         {recovery(run, killed)}")
    name = (run / "checkpoints" / "LATEST").read_text().strip()
    print(f"checkpoint       {run / 'checkpoints' / name}")
    return complete


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gptddp.demo", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("demo"), help="folder of the demo [demo]")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--replicas", type=int, default=4)
    args = parser.parse_args()
    data, run = args.dir / "volumes/data", args.dir / f"volumes/runs/{NAME}"
    prepare(data)

    job_dir = args.dir / "jobs" / NAME
    if (run / FINISHED).exists():
        say("The last demo's run is complete: removing it, to train a new one")
        shutil.rmtree(run)
        shutil.rmtree(job_dir, ignore_errors=True)

    say(f"Training on {args.replicas} pods, each a process with the environment of a real pod")
    submit = command(
        *("gptddp-k8s", "submit", "--name", NAME, "--replicas", str(args.replicas)),
        *("--local", "--local-dir", str(args.dir)),
        *("--", "--steps", str(args.steps), "--checkpoint-every", "10"),
    )
    job = subprocess.Popen(submit)
    try:
        killed = kill_at(args.steps // 2, run, job_dir / "status.json", job)
        code = job.wait()
    except KeyboardInterrupt:
        return job.wait()  # it has the signal as well, and says how to continue
    if code:
        print(f"the job ended with exit code {code}; see {job_dir}/logs", file=sys.stderr)
        return code

    complete = report(run, data, killed)
    say("A sample")
    sys.stdout.flush()
    sample = command(
        "gptddp", "sample", str(run), "--prompt", "def", "--tokens", "200", "--temperature", "0.6"
    )
    return subprocess.run(sample).returncode or int(not complete)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GptddpError as error:
        sys.exit(f"demo: {error}")
