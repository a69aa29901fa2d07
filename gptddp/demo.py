"""The demo: train on real text in four local pods, kill one, compare the bits, show samples.

    python -m gptddp.demo

Every command that it runs is printed as a user would type it. The corpus is Python's standard
library of this machine. The training has a time budget, so the demo takes the same time on a slow
machine. All files are in `demo/`.
"""

import argparse
import math
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

from gptddp import units
from gptddp.errors import GptddpError
from gptddp.files import read_json
from gptddp.report import run_record
from gptddp.run import summary
from gptddp.run.history import history, read_ledger

NAME = "demo"
VICTIM = f"{NAME}-worker-2"
# Not of the library: packages in its folder, a client with a thousand similar classes; and tables,
# tests.
LEFT_OUT = ("*-packages", "kubernetes", "encodings", "pydoc_data", "test", "tests")
# A model that transformers can load, many small steps, and the optimizer of karpathy/autoresearch:
# its loss falls fastest in so few seconds, and faster with 2 layers than with 4.
RECIPE = (
    *("--preset", "modern-tiny", "--n-layer", "2", "--head", "untied"),
    *("--optimizer", "autoresearch", "--steps", "100000"),
    *("--eval-every", "50", "--eval-tokens", "32768", "--sample-tokens", "100"),
)
# The kill is so late, and checkpoints so frequent, that a kept one is from before the kill. The
# audit recomputes the steps from there on.
KILL_AT, CHECKPOINT_EVERY, KEEP = 0.9, 1 / 24, 8  # the first two: fractions of the training time
SAMPLE_ROWS = 4


def say(text: str) -> None:
    print(f"\n\033[1m== {text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


def command(program: str, *args: str) -> list[str]:
    """A command of ours that runs from the sources; printed as a user would type it."""
    print(f"$ {program} {shlex.join(args)}", flush=True)
    begin = "k8s import main" if program == "gptddp-k8s" else "cli import cli as main"
    return [sys.executable, "-c", f"from gptddp.{begin}; main()", *args]


def prepare(data: Path, packages: bool = False) -> None:
    """Prepare the corpus, unless an earlier demo has; `packages`: with those of the environment."""
    if (data / "dataset.json").exists():
        say(f"The corpus is prepared: {data}")
        return
    say("Preparing the corpus: Python source on this machine")
    paths = sysconfig.get_paths()
    sources = [paths["stdlib"], paths["purelib"]] if packages else [paths["stdlib"]]
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


def kill_after(
    seconds: float, run: Path, status: Path, job: subprocess.Popen[bytes]
) -> float | None:
    """SIGKILL every process of one pod after this many seconds of training; return the time."""
    while job.poll() is None:
        time.sleep(0.5)
        line = last_line(run)
        if line.get("train_s", 0) < seconds:
            continue
        pid = ((read_json(status) or {}).get("pods", {}).get(VICTIM) or {}).get("pid")
        if pid is None:
            continue
        os.killpg(pid, signal.SIGKILL)
        say(f"kill -9 {VICTIM} (process {pid} and its children) at step {line['step']}")
        return time.time()
    return None


def recoveries(run: Path, killed: float) -> str:
    """The cost of the kill, from the ledger: pauses to re-form, and finished steps done again."""
    after = [event for event in read_ledger(run) if event["time"] > killed]
    moves = [event for event in after if event["event"] == "world"]
    if not moves:
        return "none: the time budget ended before the next step"
    redone = sum(event["redo"] for event in after if event["event"] == "start")
    pauses = ", then ".join(f"{it['pause_s']:.2f} s (to {it['world_size']} ranks)" for it in moves)
    return f"{pauses}; {redone} finished steps done again"


def report(run: Path, data: Path, killed: float | None) -> bool:
    """Print the result from the run's files; True if no step is missing or doubled."""
    last = last_line(run)
    val = (read_json(data / "dataset.json") or {})["splits"]["val"]
    bits = val["unigram_entropy_nats"] * val["tokens"] / val["text_bytes"] / math.log(2)
    complete = [line["step"] for line in history(run)] == list(range(1, last["step"] + 1))
    missing = "none" if complete else "SOME"
    say("Result")
    print(f"validation loss  {last['val_bpb']:.3f} bits/byte")
    print(f"baseline         {bits:.3f} bits/byte (token frequencies only)")
    print(f"steps            {last['step']}, {units.amount(last['tokens'])} tokens")
    print(f"in the log       {missing} missing or doubled")
    print(f"data             chain of all batch fingerprints {last['chain_fp']}")
    if killed is not None:
        print(f"recovery         {recoveries(run, killed)}")
    return complete


def samples(run: Path) -> None:
    """Print what the model wrote after its first evaluation, one in the middle and the last."""
    texts = run_record.samples(run)
    losses = {line["step"]: line["val_bpb"] for line in history(run) if "val_bpb" in line}
    steps = sorted(texts.keys() & losses.keys())
    say("The beginning of a file, written by the model")
    for step in dict.fromkeys([*steps[:1], *steps[len(steps) // 2 :][:1], *steps[-1:]]):
        rows = [row[:90] for row in texts[step].splitlines() if row.strip()][:SAMPLE_ROWS]
        print(f"step {step}, {losses[step]:.3f} bits/byte")
        for row in rows:
            print("  " + "".join(it if it.isprintable() else " " for it in row))


def show(run: Path, page: Path) -> int:
    """Audit the last steps and draw; an exit code."""
    say("The same bits? One process computes the last steps once more, those around the kill too")
    audited = subprocess.run(command("gptddp", "audit", str(run))).returncode
    say("The run on one page: curves, the kill and what it cost")
    drawn = subprocess.run(command("gptddp", "report", str(run), "--out", str(page))).returncode
    return audited or drawn


def next_steps(folder: Path, run: Path, page: Path) -> None:
    """Print commands to continue with."""
    say("Next")
    if sys.prefix != sys.base_prefix and "VIRTUAL_ENV" not in os.environ:
        print(f"source {shlex.quote(os.path.relpath(sys.prefix))}/bin/activate")
    data = folder / "volumes/data"
    for args, what in (
        (("sample", run, "--prompt", "def ", "--tokens", "200"), "let it write"),
        (("report", run, "--out", page), "draw the page again: open it in a browser"),
        (("checkpoints", run, "--export", folder / "model"), "for Hugging Face's transformers"),
        (("train", "--data", data, "--run-dir", folder / "deeper", "--depth", 2), "a longer run"),
    ):
        print(f"{shlex.join(['gptddp', *map(str, args)])}  # {what}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gptddp.demo", description=__doc__)
    parser.add_argument("--dir", type=Path, default=Path("demo"), help="folder of the demo [demo]")
    parser.add_argument("--seconds", type=float, default=120, help="seconds of training [120]")
    parser.add_argument("--replicas", type=int, default=4)
    args = parser.parse_args()
    data, run = args.dir / "volumes/data", args.dir / f"volumes/runs/{NAME}"
    page = args.dir / "report.html"
    prepare(data)

    job_dir = args.dir / "jobs" / NAME
    if summary.read(run).is_finished:
        say("The run of the last demo is complete: removing it and training a new one")
        shutil.rmtree(run)
        shutil.rmtree(job_dir, ignore_errors=True)

    say(f"Training on {args.replicas} pods, each a process with the environment of a real pod")
    submit = command(
        *("gptddp-k8s", "submit", "--name", NAME, "--replicas", str(args.replicas)),
        *("--local", "--local-dir", str(args.dir)),
        *("--", *RECIPE, "--lanes", str(args.replicas), "--batch", str(4 * args.replicas)),
        *("--max-time", f"{args.seconds:g}", "--keep", str(KEEP)),
        *("--checkpoint-every", f"{CHECKPOINT_EVERY * args.seconds:g}"),
    )
    job = subprocess.Popen(submit)
    try:
        killed = kill_after(KILL_AT * args.seconds, run, job_dir / "status.json", job)
        code = job.wait()
    except KeyboardInterrupt:
        code = job.wait()  # it got the signal too, and has saved
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        print("demo: stopped; the same command continues", file=sys.stderr)
        return code
    if code:
        print(f"the job ended with exit code {code}; see {job_dir}/logs", file=sys.stderr)
        return code
    if not summary.read(run).is_finished:  # another process has the job
        print("demo: the other demo is not finished: wait for it, or give --dir", file=sys.stderr)
        return 1
    complete = report(run, data, killed)
    samples(run)
    code = show(run, page)
    next_steps(args.dir, run, page)
    return code or int(not complete)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GptddpError as error:
        sys.exit(f"demo: {error}")
    except subprocess.CalledProcessError as error:  # its command has said why
        sys.exit(error.returncode)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
