"""Causes of pods that were lost and replaced, and of pods that never start."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from gptddp.k8s.objects import Object, event_time, is_ready, worker_spec
from gptddp.k8s.observe import pod_causes
from gptddp.k8s.observe.cause import Cause, cause
from gptddp.k8s.observe.endings import from_outside, how_it_ended
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.pod_log import CONTAINER

REPLACED_S, LOOP_S = 30.0, 300.0  # how long a pod's end is reported: once, and if it is frequent
# The operator reports how a container ended only in the messages of its events.
_EXITED = re.compile(r"Pod: (?:[^.\s]+\.)?(\S+) exited with code (\d+)")
_SAID = re.compile(
    r"Error pod (\S+) container (\S+) exitCode: (\d+) terminated message: (.*)", re.DOTALL
)


class Exit(NamedTuple):
    """A bad end that the operator saw: its event, and how the container ended."""

    event: Object
    pod_name: str
    text: str


def replaced(facts: Facts) -> Iterator[Cause]:
    """Pods lost a moment ago, or again and again: only events say how they ended."""
    for it in exits(facts):
        created = facts.about(facts.job, "SuccessfulCreatePod")
        own = [e for e in created if str(e.get("message", "")).endswith(f" {it.pod_name}")]
        # Count creations: the operator reports one exit several times, and restarts as well.
        times = sum(int(e.get("count") or 1) for e in own) - 1
        since_s = facts.now - event_time(it.event)
        if times > 0 and since_s < (REPLACED_S if times < 3 else LOOP_S):
            often = f", {times} times so far" if times > 2 else ""
            yield cause(facts, "replaced", f"{it.text}; it was replaced{often}", name=it.pod_name)


def exits(facts: Facts) -> Iterator[Exit]:
    """Bad ends that the operator saw, the newest first.

    The operator reports the exit code in one event, and the container's message in another.
    """
    about = facts.about(facts.job)
    last_words = [(said, e) for e in about if (said := _SAID.match(str(e.get("message", ""))))]
    for event in reversed(facts.about(facts.job, "ExitedWithCode")):
        exited = _EXITED.search(str(event.get("message", "")))
        if not exited or exited[2] == "0":
            continue
        name, terminated, container = exited[1], {"exitCode": exited[2]}, CONTAINER
        for said, other in last_words:
            near = abs(event_time(other) - event_time(event)) < 5
            if near and said.group(1, 3) == exited.group(1, 2):
                terminated |= {"reason": other["reason"], "message": said[4]}
                container = said[2]
        text = from_outside(facts, name, terminated, event_time(event))
        template = worker_spec(facts.job).get("template") or {}
        text = text or how_it_ended(template, container, terminated)
        yield Exit(event, name, text)


# -- pods that never start -----------------------------------------------------------------------


def in_vain(facts: Facts) -> Iterator[Cause]:
    """A pod that is created again and again, and whose container never starts.

    Counts the uids in the events about the pods. The operator's events cannot be counted: a client
    may send only a limited number about one object.
    """
    waiting = {pod["metadata"]["name"]: pod for pod in facts.pods if not is_ready(pod)}
    for name in (*waiting, *facts.missing):
        about = facts.ever_about(name)
        started = max(map(event_time, filter(_has_started, about)), default=0.0)
        about = [e for e in about if event_time(e) > started]
        count = len({e["involvedObject"].get("uid") for e in about})
        if count > 2:
            text = (
                f"it was created {count} times in {facts.now - event_time(about[0]):.0f} s, and "
                f"its container never started: {_reason(facts, waiting.get(name), about)}"
            )
            yield cause(facts, "in-vain", text, name=name)
            return


def _reason(facts: Facts, pod: Object | None, events: list[Object]) -> str:
    """Why a pod does not start: its newest warning, else how its init container ended."""
    for event in reversed(events):
        if event.get("type") == "Warning" and event["reason"] != "BackOff":
            return f"{event['reason']}: {event.get('message', '')}".rstrip(". ")
    crash = pod_causes.crashed(facts, pod) if pod else None
    return crash.text if crash else "its events give no reason; an init container may fail"


def _has_started(event: Object) -> bool:
    """Is it the start of a container that is no init container?"""
    about = str(event["involvedObject"].get("fieldPath", ""))
    return event.get("reason") == "Started" and "initContainers" not in about
