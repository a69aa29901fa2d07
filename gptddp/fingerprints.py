"""Did two runs train on the same rows, and to the same bits? Their logs, step by step; no torch."""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptddp.checkpoint import run_state
from gptddp.errors import DataError
from gptddp.files import explain
from gptddp.flags import differences
from gptddp.run.history import logged
from gptddp.run.log_check import LogCheck
from gptddp.run.progress import FINGERPRINT

ROWS = ("batch_fp", "chain_fp")
# The same too where the sums of both runs are exact; the last two are of some steps only.
BITS = ("loss", "grad_norm", "val_loss", "state_fp")
_OF_SOME = BITS[2:]


@dataclass(frozen=True)
class Logged:
    """What a step came to, and which life logged it."""

    batch_fp: str
    chain_fp: str
    loss: float | None
    grad_norm: float | None
    val_loss: float | None
    state_fp: str | None
    generation: int
    world_size: int | None


@dataclass(frozen=True)
class Comparison:
    """Two runs over the steps that both have logged.

    difference: the first step that differs, None where none does. same: steps that agree, before
    the first difference. bits: are losses and states compared as well? missing: for each run the
    steps that only the other has logged. wrong: what is not as it should be in the log of each.
    begun: what both were begun with differently.
    """

    runs: tuple[Path, Path]
    steps: tuple[dict[int, Logged], dict[int, Logged]]
    difference: int | None
    same: int
    bits: bool | None
    missing: tuple[list[int], list[int]]
    wrong: tuple[str | None, str | None]
    begun: list[str]


def compare(run_a: Path, run_b: Path) -> Comparison:
    """Compare two run directories; raises DataError where they cannot be compared."""
    (a, wrong_a), (b, wrong_b) = read(run_a), read(run_b)
    both = sorted(a.keys() & b.keys())
    if not both:
        raise DataError(
            f"no step is in both logs: {run_a} has {ranges(sorted(a))}, "
            f"{run_b} has {ranges(sorted(b))}"
        )
    config_a, config_b = _config(run_a), _config(run_b)
    sums = {it.get("reduce") for it in (config_a, config_b)}  # None: version 0.1.0 has none
    bits = None if None in sums else sums == {"exact"}
    parts = (i for i, step in enumerate(both) if _different(a[step], b[step], bits is True))
    same = next(parts, len(both))
    return Comparison(
        runs=(run_a, run_b),
        steps=(a, b),
        difference=both[same] if same < len(both) else None,
        same=same,
        bits=bits,
        missing=(sorted(b.keys() - a.keys()), sorted(a.keys() - b.keys())),
        wrong=(wrong_a, wrong_b),
        begun=differences(config_a, config_b),
    )


def _config(run: Path) -> dict[str, Any]:
    """As the ledger or a checkpoint has it; {} where none does: rows need none of it."""
    with contextlib.suppress(OSError):
        return run_state.read(run).config or {}
    return {}


def _different(a: Logged, b: Logged, bits: bool) -> list[str]:
    """The fields in which a step of one run differs from that of the other."""
    found = []
    for key in (*ROWS, *BITS) if bits else ROWS:
        both = getattr(a, key), getattr(b, key)
        if both[0] != both[1] and not (key in _OF_SOME and None in both):
            found.append(key)
    return found


def read(run: Path) -> tuple[dict[int, Logged], str | None]:
    """The fingerprints that a run has logged, by step, and what is wrong with its log.

    Raises DataError, naming the step.
    """
    steps = {}
    try:
        check = LogCheck(run)
        for generation, line in logged(run):
            check.add(generation, line)
            steps[line["step"]] = _fingerprints(run, generation, line)
    except OSError as error:
        raise DataError(f"cannot read the log of {run}: {explain(error)}") from error
    if not steps:
        raise DataError(f"{run} has logged no step yet: nothing to compare")
    return steps, check.found()


def _fingerprints(run: Path, generation: int, line: dict[str, Any]) -> Logged:
    for key in ROWS:
        if not FINGERPRINT.fullmatch(str(line.get(key))):
            raise DataError(
                f"{run / f'log.{generation}.jsonl'}, step {line['step']}: {key} is "
                f"{line.get(key)!r} instead of 16 hex digits: the log is damaged"
            )
    values: dict[str, Any] = {key: line.get(key) for key in (*ROWS, *BITS, "world_size")}
    return Logged(**values, generation=generation)


def describe(result: Comparison) -> str:
    """The comparison as a few lines of text."""
    a, b = result.steps
    if (step := result.difference) is None:
        both = sorted(a.keys() & b.keys())
        lines = [f"same: {result.same} steps ({ranges(both)}), chain_fp {a[both[-1]].chain_fp}"]
        if result.bits:
            lines.append(_same_bits(a, b, both))
        elif result.bits is False:
            lines.append("  only their rows: the sums of one are not exact (see --reduce)")
        else:
            lines.append("  only their rows: one does not say that its sums are exact")
    else:
        keys = _different(a[step], b[step], result.bits is True)
        lines = [f"different: step {step} ({result.same} steps before it are the same)"]
        lines += [
            f"  {key} {getattr(steps[step], key)}  {_who(run, steps[step])}"
            for key in keys
            for run, steps in zip(result.runs, result.steps, strict=True)
        ]
        if keys == ["chain_fp"]:
            lines.append("  the rows of this step are the same: those of a step before are not")
        if not set(keys) & set(ROWS):
            lines.append("  the rows are the same")
        lines += [f"  begun with another {it}" for it in result.begun]
    for run, missing in zip(result.runs, result.missing, strict=True):
        if missing:
            lines.append(f"not compared: {run} has not logged {ranges(missing)}")
    return "\n".join(lines)


def _same_bits(a: dict[int, Logged], b: dict[int, Logged], both: list[int]) -> str:
    states = [step for step in both if a[step].state_fp and b[step].state_fp]
    if not states:
        return "  and their losses; no step has the state_fp of both"
    last = f"state_fp {a[states[-1]].state_fp} at step {states[-1]}"
    return f"  and their losses, and their states after {len(states)} of the steps, {last}"


def _who(run: Path, step: Logged) -> str:
    return f"{run}, generation {step.generation}, world size {step.world_size}"


def ranges(steps: list[int]) -> str:
    """`steps 1 to 5, 9`: sorted numbers as ranges, the first three of them."""
    starts = [i for i, step in enumerate(steps) if not i or steps[i - 1] != step - 1]
    parts = []
    for start, end in zip(starts, [*starts[1:], len(steps)], strict=True):
        first, last = steps[start], steps[end - 1]
        parts.append(str(first) if first == last else f"{first} to {last}")
    more = ", ..." if len(parts) > 3 else ""
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(parts[:3])}{more}"
