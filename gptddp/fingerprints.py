"""Did two runs train on the same rows, and to the same bits? Their logs, step by step; no torch."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from pathlib import Path
from typing import Any

from gptddp.checkpoint import run_state
from gptddp.config import FIXED, KEPT
from gptddp.errors import DataError
from gptddp.flags import differences
from gptddp.run.history import logged
from gptddp.run.log_check import LogCheck, gap_text
from gptddp.run.progress import FINGERPRINT

ROWS = ("batch_fp", "chain_fp")
# Equal too if both runs use exact sums; only some steps have the last two.
BITS = ("loss", "grad_norm", "val_loss", "state_fp")


@dataclass(frozen=True)
class Logged:
    """The logged fingerprints and losses of a run, and the errors of its log."""

    run: Path
    steps: Mapping[int, Mapping[str, Any]]  # each with the `life` that logged it
    config: Mapping[str, Any]  # {} if the ledger is lost; rows do not need it
    wrong: str | None


@dataclass(frozen=True)
class Comparison:
    """Two runs, compared over the steps that both have logged; the first `same` steps agree."""

    a: Logged
    b: Logged
    both: Sequence[int]
    same: int
    bits: bool  # are losses and states compared too? Only if both runs use exact sums

    @property
    def difference(self) -> int | None:
        """The first step that differs; None: all are the same."""
        return self.both[self.same] if self.same < len(self.both) else None


def compare(run_a: Path, run_b: Path) -> Comparison:
    """Compare two run directories. Raises DataError if they cannot be compared, OSError."""
    a, b = read(run_a), read(run_b)
    both = sorted(a.steps.keys() & b.steps.keys())
    if not both:
        raise DataError(
            f"no step is in both logs: {run_a} has {_ranges(a.steps)}, "
            f"{run_b} has {_ranges(b.steps)}"
        )
    bits = {it.config.get("reduce") for it in (a, b)} == {"exact"}
    differ = (i for i, step in enumerate(both) if _different(a.steps[step], b.steps[step], bits))
    return Comparison(a, b, both, next(differ, len(both)), bits)


def read(run: Path) -> Logged:
    """Read the log of a run. Raises DataError, naming the step, and OSError."""
    steps: dict[int, Mapping[str, Any]] = {}
    check = LogCheck(run)
    for life, line in logged(run):
        check.add(life, line)
        for key in ROWS:
            if not FINGERPRINT.fullmatch(str(line.get(key))):
                raise DataError(
                    f"{run / f'log.{life}.jsonl'}, step {line['step']}: {key} is "
                    f"{line.get(key)!r} instead of 16 hex digits: the log is damaged"
                )
        kept = {key: line.get(key) for key in (*ROWS, *BITS, "world_size")}
        steps[line["step"]] = kept | {"life": life}
    if not steps:
        raise DataError(f"{run} has no logged step yet: train it first")
    return Logged(run, steps, run_state.read(run).config or {}, check.found())


def _different(a: Mapping[str, Any], b: Mapping[str, Any], bits: bool) -> list[str]:
    """The fields in which a step of one run differs from that of the other."""
    fields = (*ROWS, *BITS) if bits else ROWS
    unknown = {it for it in BITS[2:] if None in (a[it], b[it])}
    return [it for it in fields if a[it] != b[it] and it not in unknown]


def describe(result: Comparison) -> str:
    """The comparison as a few lines of text."""
    lines = _same(result) if result.difference is None else _difference(result, result.difference)
    for it, other in ((result.a, result.b), (result.b, result.a)):
        if missing := other.steps.keys() - it.steps.keys():
            lines.append(f"not compared: {it.run} has not logged {_ranges(missing)}")
    return "\n".join(lines)


def _same(result: Comparison) -> list[str]:
    a, b, both = result.a.steps, result.b.steps, result.both
    first = f"same: {result.same} steps ({_ranges(both)}), chain_fp {a[both[-1]]['chain_fp']}"
    if not result.bits:
        return [
            first,
            "  only their rows were compared: not both runs used exact sums (see --reduce)",
        ]
    states = [step for step in both if a[step]["state_fp"] and b[step]["state_fp"]]
    if not states:
        return [first, "  and their losses; no step has the state_fp of both"]
    last = f"state_fp {a[states[-1]]['state_fp']} at step {states[-1]}"
    return [first, f"  and their losses, and their states after {len(states)} of the steps, {last}"]


def _difference(result: Comparison, step: int) -> list[str]:
    a, b = result.a, result.b
    keys = _different(a.steps[step], b.steps[step], result.bits)
    lines = [f"different: step {step} ({result.same} steps before it are the same)"]
    for key in keys:
        for it in (a, b):
            found = it.steps[step]
            where = f"{it.run}, life {found['life']}, world size {found['world_size']}"
            lines.append(f"  {key} {found[key]}  {where}")
    if keys == ["chain_fp"]:
        lines.append("  the rows of this step are the same; the rows of an earlier step differ")
    if not set(keys) & set(ROWS):
        lines.append("  the rows are the same")
    both = (differences(a.config, b.config, kind) for kind in (FIXED, KEPT))
    return lines + [f"  the runs differ in {it}" for it in chain(*both)]


def _ranges(steps: Iterable[int]) -> str:
    """`steps 1 to 5, 9`: as ranges, the first three of them."""
    groups = groupby(enumerate(sorted(steps)), key=lambda it: it[1] - it[0])
    spans = [[step for _, step in group] for _, group in groups]
    return gap_text([(it[0], it[-1]) for it in spans])
