"""Texts for the events of a run, by step: restarts with their cost, and all other events."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from gptddp.errors import visible
from gptddp.report.life_records import LifeRecord, moved, number
from gptddp.report.run_record import RunRecord
from gptddp.run import moves
from gptddp.run.code_of_steps import named
from gptddp.units import duration, many, value

Notes = list[tuple[int, str]]  # step, text


def restarts(run: RunRecord) -> Notes:
    """The first steps of lives (but the first) and new ranks 0, with cause, cost and its split."""
    found = []
    for before, life in zip(run.lives, run.lives[1:], strict=False):
        if type(step := life.start.get("step")) is not int:
            continue
        who = "a new rank 0" if life.took_over else f"life {life.generation}"
        cost = "training continued" if life.took_over else "training paused"
        if life.parts:
            cost = f"{duration(life.lost_s)} ({', '.join(parts(life))})"
        why = visible(cause(before, life))
        again = many(life.redone, "step")
        found.append((step, f"{who}: {why}; {cost}; {again} done again"))
    return found


def cause(before: LifeRecord, life: LifeRecord) -> str:
    """The cause of a restart."""
    if moved(before, life):
        return "stopped by its launcher: pods joined or left"
    return before.why_over


def parts(life: LifeRecord) -> list[str]:
    """The split of a restart's cost."""
    return [f"{name} {duration(it)}" for name, it in life.parts.items()]


def others(run: RunRecord) -> Notes:
    """All other events at a step."""
    found = [(step, "skipped: loss or gradient not finite") for step in run.skipped]
    for event in run.events:
        if (what := _words(event)) and type(step := event.get("step")) is int:
            found.append((step, visible(what)[:300]))
    return sorted(found)


def _words(event: Mapping[str, Any]) -> str:
    """The text of an event; "" for events in other sections of the page."""
    names = ", ".join(map(str, it)) if isinstance(it := event.get("names"), list) else ""
    took = duration(number(event.get("seconds")))
    match event["event"]:
        case "changed" if event.get("field") == "code":
            return f"code: {named(event.get('old'))} -> {named(event.get('new'))}"
        case "changed":
            return f"{event.get('field')}: {event.get('old')} -> {event.get('new')}"
        case "quarantine":
            return f"skipped for good: {names}"
        case "diverged":
            return f"ranks differed: {names}"
        case "checkpoint" if event.get("error"):
            return f"a save failed: {event['error']}"
        case "spike":
            high, usual = number(event.get("value")), number(event.get("usual"))
            return f"{event.get('field')} is {value(high)}, but usually {value(usual)}"
        case "world":
            with suppress(LookupError, TypeError, ValueError):  # invalid
                return moves.moved(event)
        case "slow":
            return f"{event.get('name')} is slow: {number(event.get('ratio')):.1f} times the median"
        case "slow_end":
            return f"{event.get('name')} is no longer slow, after {took}"
        case "stall":
            return f"the step does not move, after {took}: {event.get('where')} ({names})"
        case "stall_end":
            return f"the step moves again, after {took}"
    return ""
