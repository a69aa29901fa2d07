"""The lines of a log that say how good a run is, found without parsing all the others."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptddp.run import branches, summary
from gptddp.run.directory import log_generations, log_path
from gptddp.run.history import history, is_step, newest_line
from gptddp.run.json_lines import parse

_EVALUATION = b'"val_loss"'  # a field of their lines


def glance(run_dir: str | Path, newest: int) -> Iterator[dict[str, Any]]:
    """The lines of `history` that have an evaluation, and the last `newest` of all, in order.

    Whether a log is whole is not looked at: it counts for every step between its first and its
    last. Raises OSError.
    """
    ledger = summary.read(run_dir)
    finished = ledger.finished or {"generation": 0, "step": 0}

    def counts(life: int, step: int) -> bool:
        is_over = life <= finished["generation"] and step > finished["step"]
        return not is_over and branches.is_on(ledger.branches, life, step)

    found: dict[int, dict[str, Any]] = {}
    newer: list[tuple[int, int, int]] = []  # a life that has been read, its first and last step
    for life in reversed(log_generations(run_dir)):
        last = newest_line(run_dir, life)
        with log_path(run_dir, life).open("rb") as log:
            first = next(filter(None, map(parse, itertools.islice(log, 2))), {})
            log.seek(0)
            own = [line for it in log if _EVALUATION in it and (line := parse(it))]
        for line in filter(is_step, own):
            step = line["step"]
            again = any(a <= step <= b and counts(of, step) for of, a, b in newer)
            if counts(life, step) and not again:
                found[step] = line
        if last and is_step(first):
            newer.append((life, first["step"], last["step"]))
    end = max((b for life, _, b in newer if counts(life, b)), default=0)
    found |= {line["step"]: line for line in history(run_dir, end - newest + 1) if is_step(line)}
    return (found[step] for step in sorted(found))
