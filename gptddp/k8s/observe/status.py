"""The status of a job, as one dict and as text."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gptddp import units
from gptddp.k8s import exit_codes
from gptddp.k8s.objects import (
    SUBMIT_LINE,
    Object,
    age_s,
    container_statuses,
    has_ended,
    is_ready,
    role_and_index,
    wanted_pods,
)
from gptddp.k8s.observe import rank_0_log, why, world
from gptddp.k8s.observe.cause import Cause
from gptddp.k8s.observe.facts import Facts

_QUIET_S = 15.0  # minimum time without a step's line until the speed counts as unknown


def describe(facts: Facts) -> dict[str, Any]:
    """Everything that `status` shows."""
    found_in_log = rank_0_log.progress(line for _, line in facts.log or ())
    job, policy = facts.job, facts.job["spec"].get("elasticPolicy") or {}
    found, state = why.causes(facts), why.state(facts.job, facts.queue)
    goes_on = state in (why.RUNNING, why.RESTARTING)
    now = world.of_job(facts) if goes_on else world.World(wanted_pods(job))
    if not goes_on:
        found_in_log["phase"] = None
    if done := found_in_log["progress"]:
        newest = (job.get("status") or {}).get("newest") or {}
        done |= {key: newest[key] for key in ("step", "loss", "tok_s") if key in newest}
        if not goes_on or now.is_stale or found_in_log["stall"] or _is_quiet(facts):
            done |= {"tok_s": None, "left_s": None}  # the last values do not hold any more
    return {
        "name": facts.name,
        "namespace": job["metadata"].get("namespace", ""),
        "state": state,
        "world": {**asdict(now), "text": now.sentence},
        "why": found[0].sentence if found else "",
        "causes": [
            {"id": c.id, "text": c.text, "pods": list(c.pods), "command": c.command} for c in found
        ],
        "age_s": round(age_s(job, facts.now)),
        "replicas": {
            "ready": sum(map(is_ready, facts.pods)),
            "desired": wanted_pods(job),
            "min": policy.get("minReplicas"),
            "max": policy.get("maxReplicas"),
        },
        "pods": [_pod(pod, facts.now) for pod in facts.pods],
        **found_in_log,
        "rank_0": facts.rank_0 or None,
        "submit": (job["metadata"].get("annotations") or {}).get(SUBMIT_LINE),
        "conditions": (job.get("status") or {}).get("conditions") or [],
    }


def _is_quiet(facts: Facts) -> bool:
    """Is the line of the next step overdue?"""
    step, gap_s = rank_0_log.pace(facts.log or ())
    if step is None or gap_s is None:
        return False
    return facts.now - step > max(_QUIET_S, 3 * gap_s)


def state_line(status: Mapping[str, Any]) -> str:
    """`Running`, or `Running on 3 of 4: demo-worker-2 is being replaced`."""
    text = status["world"]["text"]
    return f"{status['state']} on {text}" if text else str(status["state"])


def _pod(pod: Object, now: float) -> dict[str, Any]:
    return {
        "name": pod["metadata"]["name"],
        "index": role_and_index(pod)[1],
        "ready": is_ready(pod),
        "status": pod_status(pod),
        "node": pod.get("spec", {}).get("nodeName"),
        "ip": (pod.get("status") or {}).get("podIP"),
        "restarts": sum(int(c.get("restartCount", 0)) for c in container_statuses(pod)),
        "age_s": round(age_s(pod, now)),
    }


def pod_status(pod: Object) -> str:
    """The column STATUS as in kubectl: a container's reason before the pod's phase."""
    status = pod.get("status") or {}
    if "deletionTimestamp" in pod["metadata"] and not has_ended(pod):
        return "Terminating"
    word = str(status.get("reason") or status.get("phase") or "Unknown")
    for container in container_statuses(pod):
        state = container.get("state") or {}
        waiting, terminated = state.get("waiting") or {}, state.get("terminated") or {}
        if waiting.get("reason"):
            word = str(waiting["reason"])
        elif terminated.get("exitCode") or (terminated and status.get("phase") == "Succeeded"):
            # a container that succeeded, such as an init container, says nothing of a running pod
            word = str(terminated.get("reason") or f"ExitCode:{terminated.get('exitCode')}")
            if terminated.get("exitCode"):
                word += f" {exit_codes.meaning(int(terminated['exitCode']))}"
    return word


# -- text ----------------------------------------------------------------------------------------


def to_text(status: dict[str, Any], wide: bool = False) -> str:
    """The status for a reader: a few named lines, then the pods; `wide`: with their addresses."""
    count = status["replicas"]
    pods = f"{count['ready']} of {count['desired']} ready"
    if count["min"] and (count["min"], count["max"]) != (count["desired"], count["desired"]):
        pods += f" (runs with {count['min']} to {count['max']})"
    done = status["progress"]
    rows = {
        "name": status["name"],
        "namespace": status["namespace"],
        "state": state_line(status),
        "why": status["why"],
        "also": "\n".join(_also(status["causes"])),
        "age": units.duration(status["age_s"]),
        "pods": "" if status["state"] in why.FINAL else pods,
        "step": step_line(done),
        "rank 0": status["rank_0"] or "",
        **rank_0_log.rows(status),
        "checkpoint": status["checkpoint"] or "",
        "submit": status["submit"] or "",
    }
    width = max(map(len, rows)) + 2
    lines = []
    for key, text in rows.items():
        for number, line in enumerate(text.splitlines()):
            lines.append(f"{key + ':' if not number else '':{width}}{line}")
    if status["pods"]:
        lines += ["", *pods_table(status["pods"], wide)]
    changes = [
        (c["type"], c["status"], c.get("lastTransitionTime", ""), c.get("message", ""))
        for c in status["conditions"]
    ]
    if changes:
        lines += ["", *table(("CONDITION", "HOLDS", "SINCE", "MESSAGE"), changes)]
    return "\n".join(lines)


def pods_table(pods: Sequence[dict[str, Any]], wide: bool = False) -> list[str]:
    """The pods under a line of headings; `wide`: with their addresses."""
    if not pods:
        return []
    header = ["POD", "STATUS", "NODE", "RESTARTS", "AGE", *(["IP"] if wide else [])]
    cells = [
        [p["name"], p["status"], p["node"] or "-", str(p["restarts"]), units.duration(p["age_s"])]
        + ([p["ip"] or "-"] if wide else [])
        for p in pods
    ]
    return table(header, cells)


def _also(causes: Sequence[dict[str, Any]]) -> list[str]:
    """The next three causes after the first, and how many more there are."""
    rest = [Cause(c["id"], c["text"], tuple(c["pods"]), c["command"]).sentence for c in causes[1:4]]
    return rest + ([f"and {len(causes) - 4} more: -o json"] if len(causes) > 4 else [])


def step_line(done: Mapping[str, Any] | None) -> str:
    """Step and loss, and the current speed and the remaining time if known."""
    if not done:
        return ""
    speed = "" if done["tok_s"] is None else f"  {units.amount(done['tok_s'])} tok/s"
    eta = "" if done["left_s"] is None else f"  ETA {units.duration(done['left_s'])}"
    return f"{done['step']}/{done['steps']}  loss {units.loss(done['loss'])}{speed}{eta}"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of left-aligned columns, three spaces between them, as kubectl prints them."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "   ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]


def next_command(status: dict[str, Any], local: bool = False, ours: bool = True) -> str:
    """The command to run next in this state, or ""."""
    name, state = status["name"], status["state"]
    if local and state == why.SUSPENDED:
        return ""  # its `submit` continues it
    if not ours and state in (why.SUSPENDED, why.SUCCEEDED):
        return ""  # our next command would be refused
    if state == why.FAILED:
        pods = [c["pods"] for c in status["causes"] if c["pods"]]
        option = next((f" --pod {p['index']}" for p in status["pods"] if [p["name"]] in pods), "")
        return f"gptddp-k8s logs {name}{option}"
    verbs = {
        why.PENDING: "wait",
        why.QUEUED: "wait",
        why.RUNNING: "logs -f",
        why.RESTARTING: "logs -f",
        why.SUSPENDED: "resume",
        why.SUCCEEDED: "sample",
    }
    return f"gptddp-k8s {verbs[state]} {name}" if state in verbs else ""
