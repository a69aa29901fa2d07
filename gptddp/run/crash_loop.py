"""Count errors of the trainer: a step that fails three times is not tried a fourth time.

A rank that fails with an error of the trainer (not a lost peer, a signal or a user's mistake)
writes `faults/<step>.<generation>.<rank>.json` in the run directory or, before the first life, in
a folder of its pod. Kills write nothing and never count.
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

TIMES = 3  # each in another generation
# If the peers finished the step in which a rank failed, the next one fails one step later.
SPAN = 2
_NAME = re.compile(r"(\d+)\.(\d+)\.\d+\.json", re.ASCII)


def final(
    error: BaseException, folder: Path, *, step: int, generation: int, rank: int, pod: str
) -> CrashLoopError | None:
    """Record that `error` ended this process in `step`; the third time, return the final error.

    A fault no longer counts once a later generation has logged steps beyond it. None also for an
    OSError, which is not an error of the trainer, and if the record cannot be written.
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
    if len({writer for _, writer in near}) < TIMES:
        return None
    oldest = min(writer for _, writer in near)
    for life in log_generations(folder):
        if life > oldest:
            end = last_step(folder, life)
            near = {(at, writer) for at, writer in near if life <= writer or end <= at + SPAN}
    times = len({writer for _, writer in near})
    if times < TIMES:
        return None
    print(f"[rank {rank}] {stack}", file=sys.stderr, end="")
    what = f"step {step}" if step else "the start, before the first step,"
    return CrashLoopError(
        f"{what} failed {times} times with an error of the trainer, the last time on "
        + (first(folder, generation) or _describe(mine))
    )


def early(error: Exception) -> CrashLoopError | None:
    """Count an error of the trainer before its life begins; the third time, return the final error.

    Errors are counted in the pod, as the run directory may not exist yet. None under plain
    torchrun, which does not count.
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
    """The first error of the trainer in this generation; None if there was none."""
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
    """Remove this pod's errors from before the first life, once a life has begun."""
    shutil.rmtree(folder / FAULTS, ignore_errors=True)
