"""The trainer's own errors, counted: a step that fails in three lives is not tried a fourth time.

A rank that fails by an error of its own, and not for a lost peer, a signal or a user's mistake,
leaves `faults/<step>.<generation>.<rank>.json` in the run directory or, as long as no life has
begun, in a folder of its pod. Kills leave nothing and never count.
"""

import contextlib
import re
import shutil
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptddp.distributed import environment
from gptddp.errors import CrashLoopError, visible
from gptddp.files import read_json, write_json_atomic
from gptddp.run.directory import FAULTS, log_generations
from gptddp.run.history import last_step

LIVES = 3
# A rank that fails after its peers have done the step fails at the next one in its next life.
SPAN = 2
_NAME = re.compile(r"(\d+)\.(\d+)\.\d+\.json", re.ASCII)


def final(
    error: BaseException, folder: Path, *, step: int, generation: int, rank: int, pod: str
) -> CrashLoopError | None:
    """Record that `error` has ended this life in `step`; at the third life, the job's final error.

    A fault is past once a later generation has logged steps beyond it. An OSError is not the
    trainer's own, and where nothing can be written nothing is counted: None.
    """
    if isinstance(error, OSError):
        return None
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    stack = "".join(traceback.format_exception(error))
    mine = {"error": text, "rank": rank, "pod": pod, "time": time.time(), "traceback": stack}
    faults = folder / FAULTS
    try:
        faults.mkdir(exist_ok=True)
        write_json_atomic(faults / f"{step}.{generation}.{rank}.json", mine)
        found = [match for path in faults.iterdir() if (match := _NAME.fullmatch(path.name))]
    except OSError:
        return None
    near = {(int(m[1]), int(m[2])) for m in found if step - SPAN <= int(m[1]) <= step}
    if len({life for _, life in near}) < LIVES:
        return None
    oldest = min(writer for _, writer in near)
    for life in log_generations(folder):
        if life > oldest:
            end = last_step(folder, life)
            near = {(at, writer) for at, writer in near if life <= writer or end <= at + SPAN}
    lives = len({life for _, life in near})
    if lives < LIVES:
        return None
    print(f"[rank {rank}] {stack}", file=sys.stderr, end="")
    what = f"step {step} has" if step else "the way to the first step has"
    return CrashLoopError(
        f"{what} failed in {lives} lives by an error of the trainer's own, the last time on "
        + (first(folder, generation) or _describe(mine))
    )


def early(error: Exception) -> CrashLoopError | None:
    """Count an error of the trainer's own that came before the life; the final one in the third.

    It is counted in the pod, as there may be no run directory yet. Under plain torchrun nobody
    counts: None.
    """
    if (verdict := environment.verdict()) is None:
        return None
    return final(
        error,
        verdict.parent,
        step=0,
        generation=environment.restarts(),
        rank=environment.ranks().rank,
        pod=environment.pod(),
    )


def first(folder: Path, generation: int) -> str | None:
    """The first of the errors of its own by which a life ended; None if there was none."""
    records: list[dict[str, Any]] = []
    for path in (folder / FAULTS).glob(f"*.{generation}.*.json"):
        with contextlib.suppress(OSError, ValueError):
            records.append(read_json(path) or {})
    with contextlib.suppress(LookupError, TypeError):
        return _describe(min(records, key=lambda record: record["time"], default={}))
    return None


def _describe(record: Mapping[str, Any]) -> str:
    return visible(f"rank {record['rank']} ({record['pod']}): {record['error']}")


def forget(folder: Path) -> None:
    """Remove what this pod has counted before the first life: one has begun."""
    shutil.rmtree(folder / FAULTS, ignore_errors=True)
