"""Did two runs train on the same rows? Their logs, compared step by step; without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptddp.errors import DataError
from gptddp.files import explain
from gptddp.run.audit import Audit
from gptddp.run.history import logged
from gptddp.run.progress import FINGERPRINT

KEYS = ("batch_fp", "chain_fp")


@dataclass(frozen=True)
class Logged:
    """A step's fingerprints, and which life logged them."""

    batch_fp: str
    chain_fp: str
    generation: int
    world_size: int | None


@dataclass(frozen=True)
class Comparison:
    """Two runs over the steps that both have logged.

    difference: the first step that differs, None where none does. same: steps that agree, before
    the first difference. missing: for each run the steps that only the other has logged. wrong:
    what is not as it should be in the log of each.
    """

    runs: tuple[Path, Path]
    steps: tuple[dict[int, Logged], dict[int, Logged]]
    difference: int | None
    same: int
    missing: tuple[list[int], list[int]]
    wrong: tuple[str | None, str | None]


def compare(run_a: Path, run_b: Path) -> Comparison:
    """Compare two run directories; raises DataError where they cannot be compared."""
    (a, wrong_a), (b, wrong_b) = read(run_a), read(run_b)
    both = sorted(a.keys() & b.keys())
    if not both:
        raise DataError(
            f"no step is in both logs: {run_a} has {ranges(sorted(a))}, "
            f"{run_b} has {ranges(sorted(b))}"
        )
    equal = ((a[s].batch_fp, a[s].chain_fp) == (b[s].batch_fp, b[s].chain_fp) for s in both)
    same = next((i for i, it in enumerate(equal) if not it), len(both))
    return Comparison(
        runs=(run_a, run_b),
        steps=(a, b),
        difference=both[same] if same < len(both) else None,
        same=same,
        missing=(sorted(b.keys() - a.keys()), sorted(a.keys() - b.keys())),
        wrong=(wrong_a, wrong_b),
    )


def read(run: Path) -> tuple[dict[int, Logged], str | None]:
    """The fingerprints that a run has logged, by step, and what is wrong with its log.

    Raises DataError, naming the step.
    """
    steps = {}
    try:
        audit = Audit(run)
        for generation, line in logged(run):
            audit.add(generation, line)
            steps[line["step"]] = _fingerprints(run, generation, line)
    except OSError as error:
        raise DataError(f"cannot read the log of {run}: {explain(error)}") from error
    if not steps:
        raise DataError(f"{run} has logged no step yet: nothing to compare")
    return steps, audit.found()


def _fingerprints(run: Path, generation: int, line: dict[str, Any]) -> Logged:
    for key in KEYS:
        if not FINGERPRINT.fullmatch(str(line.get(key))):
            raise DataError(
                f"{run / f'log.{generation}.jsonl'}, step {line['step']}: {key} is "
                f"{line.get(key)!r} instead of 16 hex digits: the log is damaged"
            )
    return Logged(line["batch_fp"], line["chain_fp"], generation, line.get("world_size"))


def describe(result: Comparison) -> str:
    """The comparison as a few lines of text."""
    a, b = result.steps
    if (step := result.difference) is None:
        both = sorted(a.keys() & b.keys())
        lines = [f"same: {result.same} steps ({ranges(both)}), chain_fp {a[both[-1]].chain_fp}"]
    else:
        keys = [key for key in KEYS if getattr(a[step], key) != getattr(b[step], key)]
        lines = [f"different: step {step} ({result.same} steps before it are the same)"]
        lines += [
            f"  {key} {getattr(steps[step], key)}  {_who(run, steps[step])}"
            for key in keys
            for run, steps in zip(result.runs, result.steps, strict=True)
        ]
        if keys == ["chain_fp"]:
            lines.append("  the rows of this step are the same: those of a step before are not")
    for run, missing in zip(result.runs, result.missing, strict=True):
        if missing:
            lines.append(f"not compared: {run} has not logged {ranges(missing)}")
    return "\n".join(lines)


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
