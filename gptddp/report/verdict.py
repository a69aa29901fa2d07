"""The state of a run, and a verdict in a sentence."""

import math
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile

from gptddp.budget import BUDGETS, last_step, shown
from gptddp.checkpoint.run_state import why_ended
from gptddp.report.life_records import LifeRecord, moved, number
from gptddp.report.run_record import RunRecord
from gptddp.run import crash_loop, lease_file
from gptddp.run.directory import LEASE
from gptddp.run.lease import EXPIRY_S
from gptddp.units import amount, clock, duration, many

# From another machine, whose clock differs, a lease may seem older than it is.
_SILENT_S = 2.5 * EXPIRY_S

_RECENT = 20  # steps for the present pace


@dataclass(frozen=True)
class Verdict:
    """state: finished, running, stopped, failed or lost. why: the reason, for a sentence."""

    state: str
    why: str = ""


def verdict_of(run: RunRecord) -> Verdict:
    """The present state of a run. Raises OSError."""
    if not run.lives:
        return Verdict("running") if _is_held(run) else Verdict("lost", "no life has begun a step")
    newest = run.lives[-1]
    if newest.stop and newest.cause in BUDGETS:
        why = why_ended(run.config, newest.cause, run.done) if run.config else newest.why_over
        return Verdict("finished", why)
    if newest.stop:
        return Verdict("stopped", newest.why_over)
    if _is_held(run):
        return Verdict("running")
    if error := crash_loop.first(run.path, newest.generation):
        return Verdict("failed", f"an error of the trainer: {error}")
    most = run.config.max_skipped if run.config else None
    at_end = len(list(takewhile(set(run.skipped).__contains__, reversed(run.steps))))
    if most and at_end > most:
        return Verdict("failed", f"the last {at_end} steps had no finite loss or gradient")
    return Verdict("lost", "its last life did not record its end, and no process holds the run now")


def _is_held(run: RunRecord) -> bool:
    """Does a process hold the lease, as far as this machine can know?"""
    seen = lease_file.read(run.path / LEASE)
    lease = lease_file.parse(seen[0]) if seen else None
    if seen is None or lease is None:
        return False
    with suppress(LookupError, TypeError):
        if lease_file.is_over(lease, lease_file.lease_of(None, "")):
            return False
    return time.time() - seen[1] / 1e9 < _SILENT_S


def sentences(run: RunRecord, verdict: Verdict) -> str:
    """The run in a sentence or two."""
    return f"{_progress(run, verdict)} {_restarts(run, verdict.state)}".rstrip()


def _progress(run: RunRecord, verdict: Verdict) -> str:
    done, state = run.done, verdict.state
    # a log without its end lacks these values
    last = run.lives[-1].stop if done > run.step else run.last
    tokens, train_s = int(number(last.get("tokens"))), number(last.get("train_s"))
    where = f"step {done:,}"
    if run.config and done and state != "finished":
        where = f"step {shown(run.config, done, tokens, train_s)}"
    where = f"after {where}" if done else "before its first step"
    where += f", {amount(tokens)} tokens" * (tokens > 0)
    why = f": {verdict.why}" if verdict.why else ""
    at = f", last seen at {clock(last['time'])} UTC" if number(last.get("time")) else ""
    return {
        "finished": f"Finished {where} in {duration(elapsed(run))}{why}.",
        "running": f"Running, {where}.",
        "stopped": f"Stopped {where}{why}.",
        "failed": f"Failed {where}{why}.",
        "lost": f"Not running and not finished, {where}{at}{why}.",
    }[state]


def elapsed(run: RunRecord) -> float:
    """Seconds from the start of the first life to the last recorded time."""
    ends = [number(run.last.get("time")), *(number(it["time"]) for it in run.events)]
    return max(0.0, max(ends) - run.lives[0].began) if run.lives else 0.0


def left_s(run: RunRecord) -> float | None:
    """Seconds until its end at the pace of its last steps; None: unknown."""
    speeds = list(filter(math.isfinite, run.series["tok_s"][-_RECENT:]))
    tokens, train_s = int(number(run.last.get("tokens"))), number(run.last.get("train_s"))
    if not (run.config and tokens and any(speeds)):
        return None
    steps = last_step(run.config, run.step, tokens, train_s) - run.step
    return max(0.0, steps) * tokens / run.step / statistics.median(speeds)


def _restarts(run: RunRecord, state: str) -> str:
    every = zip(run.lives, run.lives[1:], strict=False)
    pairs = [(before, life) for before, life in every if not life.took_over]
    changes = [number(it.get("pause_s")) for it in run.events_of("world")]
    if not pairs and not changes:
        return "Nothing interrupted it." if state in ("finished", "running", "stopped") else ""
    moves = [life for before, life in pairs if moved(before, life)]
    faults = [life for it, life in pairs if life.follows_fault and not moved(it, life)]
    texts = []
    if faults:
        redone = sum(it.redone for it in faults)
        again = f"{many(redone, 'step')} had to be done again" if redone else "no step was lost"
        texts.append(f"faults interrupted it {_times(len(faults))}{_took(faults)}; {again}")
    if moves:
        texts.append(f"pods joined or left {_times(len(moves))}{_took(moves)}")
    if stops := len(pairs) - len(faults) - len(moves):
        texts.append(f"it was stopped and continued {_times(stops)}")
    if changes:
        in_all = " in all" * (len(changes) > 1)
        paused = f"with a pause of {duration(sum(changes))}{in_all}"
        texts.append(f"ranks were lost or joined {_times(len(changes))}, {paused}")
    text = "; ".join(texts)
    return f"{text[0].upper()}{text[1:]}."


def _took(lives: Sequence[LifeRecord]) -> str:
    """The text for the time until steps continued, if the ledger has it."""
    known = [it.lost_s for it in lives if it.parts]
    return f", which took {duration(sum(known))}{' in all' * (len(known) > 1)}" if known else ""


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")
