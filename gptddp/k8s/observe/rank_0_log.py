"""Parses rank 0's log: the only place that reads its lines.

`status` and the line of a local job show these numbers. Lines of older versions have fewer.
"""

import contextlib
import re
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from typing import Any

from gptddp import units
from gptddp.k8s.cluster import Cluster
from gptddp.k8s.exit_codes import ClusterError
from gptddp.k8s.objects import has_log, started
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.pod_log import CONTAINER, parse

Log = Sequence[tuple[datetime | None, str]]  # lines with their times

TAIL = 200  # lines of a log that are searched for the newest step
_AT_ONCE = 16  # number of logs read at the same time
_NEW_S = 60.0  # a pod with a line newer than this certainly has rank 0
_STEP = re.compile(
    r"step (?P<step>\d+)/~?(?P<steps>\d+)  loss (?P<loss>\S+).*?"
    r"  (?P<speed>[\d.]+ ?[kMBT]?) tok/s(?:  (?P<ranks>\d+) ranks?)?"
    r"(?:  ETA (?P<eta>\d\S* \w+(?: \d+ \w+)?))?"
    r"(?:  goodput (?:< )?(?P<goodput>[\d.]+) %)?(?P<storage>  storage fails)?"
    r"(?:  slow: (?P<slow>.*))?"
)
_WORLD = re.compile(r"^step \d+: .*; (?P<ranks>\d+) ranks? go on after ")
_PHASE = re.compile(r"^\[\d+\.\d s\] (.*)")  # of gptddp/live.py
_BPB = re.compile(r"^step \d+: validation loss .*, ([\d.]+) bits a byte")
_LIFE = re.compile(r"^life \d+: from .*, step (?P<step>\d+)")
_SLOW = re.compile(r"(rank \d+(?: \([^)]*\))?) (\d+\.\d)x")
_SAVED = re.compile(r"checkpoint (step-\S+) is saved|^life \d+: from (step-[^,\s]+)")
_STALL = re.compile(r"^(?:gptddp\.launch: )?step (\d+) has not moved for (\d+) s: (.*)")
_MOVED = re.compile(r"^step \d+ has moved|^life \d+: from ")
_NAMED = re.compile(
    r"^step \d+: (?P<name>rank \d+(?: \([^)]*\))?) is (?:slow: it takes (?P<ratio>\d+\.\d) times"
    r"|as fast as the others again)"
)
_STORAGE = re.compile(r"^STORAGE: (?P<trouble>(?!it works again).*)?")
# lines after which the ranks are different ones
_BEGUN = re.compile(r"^life \d+: from |^step \d+: .*; \d+ ranks? go on after ")
_FAULT = re.compile(r"^life (\d+) ended after step (\d+): (.*)")
_LOST = re.compile(r"^step (\d+): lost (.*); \d+ ranks? go on after ")  # the life continues


def with_log(cluster: Cluster, facts: Facts) -> Facts:
    """Add the end of the log of rank 0's pod to the facts; unchanged if no log can be read.

    Any pod may have rank 0. It is the rank that has been in the training longest, so the logs are
    read by the pods' age, _AT_ONCE at a time, until one has a new line of rank 0.
    """
    pods = sorted(filter(has_log, facts.pods), key=started)
    logs: dict[str, Log] = {}  # by pod
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for i in range(0, len(pods), _AT_ONCE):
            names = [str(pod["metadata"]["name"]) for pod in pods[i : i + _AT_ONCE]]
            found = threads.map(lambda name: _end_of(cluster, name), names)
            logs |= {name: log for name, log in zip(names, found, strict=True) if log is not None}
            if logs and facts.now - newest(of_rank_0(logs.values()))[0] < _NEW_S:
                break
    if not logs:
        return facts
    pod = max(logs, key=lambda name: newest(logs[name]))
    return replace(facts, log=logs[pod], rank_0=pod if any(newest(logs[pod])) else "")


def _end_of(cluster: Cluster, pod: str) -> Log | None:
    with contextlib.suppress(ClusterError):  # the node does not answer
        log = cluster.log(pod, container=CONTAINER, tail=TAIL, quiet_s=5.0)
        return [parse(line) for line in log]
    return None


def of_rank_0(logs: Iterable[Log]) -> Log:
    """Of these logs of one pod each, the log with the newest line of rank 0."""
    return max(logs, key=newest)


def newest(log: Log) -> tuple[float, int]:
    """Time (unix seconds) and step of the newest line of rank 0; 0 if not known."""
    for at, line in reversed(log):
        if found := _STEP.search(line) or _LIFE.match(line):
            return at.timestamp() if at else 0.0, int(found["step"])
    return 0.0, 0


def progress(logged: Iterable[str]) -> dict[str, Any]:
    """The newest value of each field in these lines, None if no line has it.

    `progress`: step, steps, loss, tok_s, left_s, ranks, goodput (0 to 1), and slow ranks with the
    ratio to the median. `checkpoint`: the newest, if named. `storage`: its trouble. `stall`: a step
    that does not move. `fault`: the newest end of a killed life, or loss of ranks. `phase`: the
    work outside of steps. `bits_per_byte`: of the last evaluation.
    """
    names = ("progress", "checkpoint", "storage", "stall", "fault", "phase", "bits_per_byte")
    found: dict[str, Any] = dict.fromkeys(names)
    slow: dict[str, float] = {}  # by name; a step's line comes only every `log_every` steps
    for line in logged:
        if step := _STEP.search(line):
            found |= {"progress": (done := _step(step)), "stall": None, "checkpoint": None}
            found["phase"] = None
            slow = {it["name"]: it["ratio"] for it in done["slow"]}
            if step["storage"]:
                found["storage"] = found["storage"] or "it fails: the pod's log says how"
        elif named := _NAMED.match(line):
            slow.pop(named["name"], None)
            if named["ratio"]:
                slow[named["name"]] = float(named["ratio"])
        elif stall := _STALL.match(line):
            seconds = int(stall[2])
            found["stall"] = {"step": int(stall[1]), "seconds": seconds, "text": stall[3]}
        elif fault := _FAULT.match(line):
            about = {"life": int(fault[1]), "step": int(fault[2]), "cause": fault[3]}
            found["fault"] = about
        elif lost := _LOST.match(line):
            found["fault"] = {"life": None, "step": int(lost[1]), "cause": f"lost {lost[2]}"}
        elif storage := _STORAGE.match(line):
            found["storage"] = storage["trouble"]
        elif phase := _PHASE.match(line):
            found["phase"] = phase[1]
        elif bpb := _BPB.match(line):
            found |= {"phase": None, "bits_per_byte": float(bpb[1])}
        elif saved := _SAVED.search(line):
            found["checkpoint"] = saved[1] or saved[2]
        if _MOVED.match(line):
            found["stall"] = None
        if _BEGUN.match(line):
            slow, found["storage"], found["phase"] = {}, None, None
            (found["progress"] or {}).update(tok_s=None, left_s=None)
    if found["progress"]:
        found["progress"]["slow"] = [{"name": it, "ratio": slow[it]} for it in slow]
    return found


def world(log: Log) -> tuple[int, float]:
    """Number of ranks in the newest line that has it, and the line's time; 0 if not known."""
    for at, line in reversed(log):
        if (found := _STEP.search(line) or _WORLD.match(line)) and found["ranks"]:
            return int(found["ranks"]), at.timestamp() if at else 0.0
    return 0, 0.0


def pace(log: Log) -> tuple[float | None, float | None]:
    """Time of the newest line of a step (unix seconds), and the longest gap between two (seconds).

    None if not known.
    """
    times = [at.timestamp() for at, line in log if at and _STEP.search(line)]
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    return times[-1] if times else None, max(gaps, default=None)


def ranks(line: str) -> int | None:
    """Number of ranks that have done the step of this line; None: no step, or no number."""
    found = _STEP.search(line)
    return int(found["ranks"]) if found and found["ranks"] else None


def _step(found: re.Match[str]) -> dict[str, Any]:
    loss, goodput, eta = found["loss"], found["goodput"], found["eta"]
    slow = _SLOW.findall(found["slow"] or "")
    return {
        "step": int(found["step"]),
        "steps": int(found["steps"]),
        "loss": float(loss) if re.fullmatch(r"\d+(\.\d+)?", loss) else None,
        "tok_s": units.number(found["speed"]),
        "left_s": None if eta is None else units.seconds(eta),
        "ranks": int(found["ranks"]) if found["ranks"] else None,
        "goodput": None if goodput is None else round(float(goodput) / 100, 3),
        "slow": [{"name": name, "ratio": float(ratio)} for name, ratio in slow],
    }


def rows(found: dict[str, Any]) -> dict[str, str]:
    """The fields of `progress` for a reader: name -> text, "" if not known."""
    done, stall, fault = found["progress"] or {}, found["stall"], found["fault"]
    bpb = found["bits_per_byte"]
    shown = {"bits/byte": "" if bpb is None else f"{bpb:.3f}", "now": found["phase"] or ""}
    shown |= {"goodput": "", "storage": found["storage"] or "", "slow": "", "stalled": ""}
    shown["last fault"] = ""
    if stall:
        shown["stalled"] = f"step {stall['step']}, {stall['seconds']} s: {stall['text']}"
    if slow := done.get("slow"):
        shown["slow"] = ", ".join(f"{it['name']} {it['ratio']:.1f} times the median" for it in slow)
    if done.get("goodput") is not None:
        shown["goodput"] = units.percent(done["goodput"])
    if fault:
        life = f"life {fault['life']}, " if fault["life"] else ""
        shown["last fault"] = f"{life}after step {fault['step']}: {fault['cause']}"
    return shown
