"""What has become of a run: its state, the verdict in a sentence, and what to type next."""

import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gptddp.budget import shown
from gptddp.report.lives import Life, moved, number, why_over
from gptddp.report.read import Run
from gptddp.report.words import amount, clock, duration, many, percent, value
from gptddp.run import crash_loop, lease_file, owners
from gptddp.run.directory import LEASE
from gptddp.run.finished import why_ended
from gptddp.run.lease import EXPIRY_S

# A lease that is looked at from another machine, whose clock differs, may seem older than it is.
_SILENT_S = 2.5 * EXPIRY_S


@dataclass(frozen=True)
class State:
    """word: finished, running, stopped, failed or lost. why: as a sentence may have it."""

    word: str
    why: str = ""


def state_of(run: Run) -> State:
    """What the run is doing now. Raises OSError."""
    newest = run.lives[-1] if run.lives else None
    life = newest.generation if newest else 0
    if run.marker and life <= number(run.marker.get("generation", life)):
        cause, done = str(run.marker.get("cause", "")), int(number(run.marker.get("step")))
        known = run.config is not None and cause in ("steps", "max_tokens", "max_time")
        why = why_ended(run.config, cause, done) if known and run.config else cause
        return State("finished", why)
    if newest and newest.stop:
        return State("stopped", why_over(newest))
    if _is_held(run):
        return State("running")
    if newest and (error := crash_loop.first(run.path, life)):
        return State("failed", f"an error of the trainer's own: {error}")
    most = run.config.max_skipped if run.config else None
    at_end = _skipped_at_end(run)
    if most and at_end > most:
        return State("failed", f"the last {at_end} steps had no finite loss or gradient")
    if not newest:
        return State("lost", "no life of it has begun a step")
    return State("lost", "its last life left no word of its end, and nobody holds the run now")


def _is_held(run: Run) -> bool:
    """Does a process hold the lease, as far as can be seen from here?"""
    seen = lease_file.read(run.path / LEASE)
    lease = lease_file.parse(seen[0]) if seen else None
    if seen is None or lease is None:
        return False
    with suppress(LookupError, TypeError):
        if lease_file.is_over(lease, lease_file.lease_of(None, "")):
            return False
    return time.time() - seen[1] / 1e9 < _SILENT_S


def _skipped_at_end(run: Run) -> int:
    skipped, at_end = set(run.skipped), 0
    for step in reversed(run.steps):
        if step not in skipped:
            break
        at_end += 1
    return at_end


def verdict(run: Run, state: State) -> str:
    """The run in a sentence or two."""
    return " ".join(
        filter(None, (_progress(run, state), _result(run), _faults(run, state.word), _goodput(run)))
    )


def _progress(run: Run, state: State) -> str:
    c, last, done = run.config, run.last, run.done
    if done > run.step:  # a log that lacks its end says nothing of it
        last = run.marker or {}
    tokens, train_s = int(number(last.get("tokens"))), number(last.get("train_s"))
    where = f"step {done:,}"
    if c and done and state.word != "finished":
        where = f"step {shown(c, done, tokens, train_s)}"
    of = f"after {where}" if done else "before its first step"
    if tokens:
        of += f", {amount(tokens)} tokens"
    why = f": {state.why}" if state.why else ""
    match state.word:
        case "finished":
            whole = f" in {duration(elapsed(run))}" if run.lives else ""
            return f"Finished {of}{whole}{why}."
        case "running":
            return f"Running, {of}."
        case "stopped":
            return f"Stopped {of}, in good order{why}."
        case "failed":
            return f"Failed {of}: {state.why}."
    at = f", last heard of at {clock(last['time'])} UTC" if number(last.get("time")) else ""
    return f"Not running, and not finished, {of}{at}: {state.why}."


def elapsed(run: Run) -> float:
    """From the first life's beginning to the last that is known."""
    ends = [number(run.last.get("time")), *(number(it["time"]) for it in run.events)]
    return max(0.0, max(ends) - run.lives[0].began)


def _result(run: Run) -> str:
    for name, unit in (("val_bpb", "bits a byte"), ("val_loss", "nats a token")):
        known = [
            (step, it) for step, it in zip(run.steps, run.series[name], strict=True) if it == it
        ]
        if known:
            step, it = known[-1]
            at = "" if step == run.step else f" (at step {step:,})"
            return f"Validation: {value(it)} {unit}{at}."
    known = [(step, it) for step, it in zip(run.steps, run.series["loss"], strict=True) if it == it]
    return f"Training loss: {value(known[-1][1])} at step {known[-1][0]:,}." if known else ""


def _faults(run: Run, word: str) -> str:
    pairs = list(zip(run.lives, run.lives[1:], strict=False))
    if not pairs:
        return "Nothing interrupted it." if word in ("finished", "running", "stopped") else ""
    moves = [life for before, life in pairs if moved(before, life)]
    faults = [life for it, life in pairs if life.follows_fault and not moved(it, life)]
    texts = []
    if faults:
        redo = sum(int(number(it.start.get("redo"))) for it in faults)
        again = many(redo, "step") if redo else "no step"
        texts.append(
            f"a fault interrupted it {_cost(faults).rstrip(',')}; {again} had to be done again"
        )
    if moves:
        texts.append(f"it was formed anew {_cost(moves)} as pods came or went")
    if stops := len(pairs) - len(faults) - len(moves):
        texts.append(f"it was stopped and continued {_times(stops)}")
    text = "; ".join(texts)
    return f"{text[0].upper()}{text[1:]}."


def _cost(lives: Sequence[Life]) -> str:
    """How often, and what it took until the first new step, where somebody has written it down."""
    known = [number(it.recovered.get("total_s")) for it in lives if it.recovered]
    in_all = " in all" if len(known) > 1 else ""
    return _times(len(lives)) + (f", for {duration(sum(known))}{in_all}," if known else "")


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def goodput(run: Run) -> tuple[float, dict[str, float]] | None:
    """The part of all rank-seconds that trained, and all by owner; None where nobody wrote down.

    The same as the metrics gptddp_run_goodput_ratio and gptddp_run_lost_seconds.
    """
    seconds = run.owners.so_far()
    part = owners.goodput(seconds) if run.tells_seconds else None
    return None if part is None else (part, seconds)


def without_stops(seconds: Mapping[str, float]) -> float | None:
    """The goodput of the time in which somebody meant to train; None where nobody has stopped."""
    rest = sum(seconds.values()) - seconds["stopped"]
    return seconds["training"] / rest if seconds["stopped"] and rest > 0 else None


def _goodput(run: Run) -> str:
    if not (found := goodput(run)):
        return ""
    part, seconds = found
    rest = {name: it for name, it in seconds.items() if name not in ("training", "stopped")}
    owner = max(rest, key=lambda it: rest[it])
    total, own = sum(seconds.values()), without_stops(seconds)
    most = f"; most of the rest: {owner} ({percent(rest[owner] / total)})" if rest[owner] else ""
    if own is not None:
        total -= seconds["stopped"]
        most = f"; most of the rest: {owner} ({percent(rest[owner] / total)})"
        return (
            f"Goodput: {percent(own)} of all rank-seconds in which it was not stopped went to new"
            f" steps ({percent(part)} with the stops){most}."
        )
    return f"Goodput: {percent(part)} of all rank-seconds went to new steps{most}."


def next_commands(run: Run, state: State) -> list[tuple[str, str]]:
    """What to type, wherever that is on this machine, and what for."""
    path, audit = run.quoted, []
    if run.step:
        data = "" if _is_absolute(run) else f" --data {data_of(run)}"
        command = f"gptddp audit {path}{data}"
        audit = [(command, "compute the steps once more and compare every bit")]
    usable = any(it.ok for it in run.checkpoints)
    check = [(f"gptddp checkpoints {path} --verify", "what it can go on from")]
    match state.word:
        case "finished" if not usable:
            return [(check[0][0], "none can be used: this says why"), *audit]
        case "finished":
            return [
                (f"gptddp sample {path} --prompt 'Once upon'", "a text of its newest checkpoint"),
                *audit,
            ]
        case "running":
            return [
                (f"gptddp log {path} | tail -1", "its newest step"),
                (f"gptddp report {path}", "this page anew"),
            ]
        case "failed" if run.faults:
            return [(f"ls {path}/faults", "the traceback of each rank and life"), *again(run)]
    return [*again(run), *(check if run.step else []), *audit]


def again(run: Run) -> list[tuple[str, str]]:
    """The command that goes on with the run."""
    command = f"gptddp train --data {data_of(run)} --run-dir {run.quoted}"
    why = "goes on from its newest state; where a job or torchrun began it, give that command again"
    return [(command, why)]


def data_of(run: Run) -> str:
    """Its dataset, for a shell. One that was given from some folder is looked for from there."""
    if not run.config or not run.config.data:
        return "DATASET"
    data, given = Path(run.config.data), Path(run.config.run_dir)
    path = run.path.resolve()
    if not given.is_absolute() and path.parts[-len(given.parts) :] == given.parts:
        data = path.parents[len(given.parts) - 1] / data
    return shlex.quote(str(data))


def _is_absolute(run: Run) -> bool:
    return run.config is not None and Path(run.config.data).is_absolute()
