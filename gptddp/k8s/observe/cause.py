"""One thing that keeps a job or its pods from running: its id, a sentence, and a command."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from string import Template

from gptddp.k8s.objects import Object, is_ours
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.known_causes import KNOWN
from gptddp.k8s.observe.pod_log import CONTAINER

_PATCH = 'kubectl patch pytorchjob $job --type merge -p \'{"spec": {"runPolicy": %s}}\''
_RESUME = _PATCH % '{"suspend": false}'
# Causes whose command fixes them, and kubectl's command for a job that is not ours. `held` has
# none: its Workload's name is unknown.
MENDS = {"in-vain": _PATCH % '{"suspend": true}', "suspended": _RESUME, "no-kueue": _RESUME}
MENDS["held"] = ""


@dataclass(frozen=True)
class Cause:
    """One thing that keeps pods from running.

    `text` names the object and the field; `command` shows more, or fixes it.
    """

    id: str
    text: str
    pods: tuple[str, ...] = ()
    command: str = ""

    @property
    def sentence(self) -> str:
        verb = "run" if self.id in MENDS else "see"
        after = f"; {verb} `{self.command}`" if self.command else ""
        if not self.pods:
            return f"{self.text}{after}"
        first = ", ".join(self.pods[:3]) + (" and more" if len(self.pods) > 3 else "")
        return f"{'pod' if len(self.pods) == 1 else 'pods'} {first}: {self.text}{after}"


def cause(
    facts: Facts, id: str, text: str, *, pod: Object | None = None, name: str = "", **named: str
) -> Cause:
    """A cause with its command for this job, pod and cluster.

    `name`: name of a pod that is gone. `named`: other names in the command, such as a claim.
    """
    name = str(pod["metadata"]["name"]) if pod else name
    pods = (name,) if name else ()
    command = KNOWN[id]
    if id in MENDS and not is_ours(facts.job, facts.name):
        command = MENDS[id]
    if facts.local or not command:  # without a cluster the text says everything
        return Cause(id, text, pods)
    if facts.job.get("kind") == "Job":  # of `prepare` and `sample`
        command = command.replace("pytorchjob", "job")
    known = {
        "job": facts.name,
        "namespace": str(facts.job["metadata"].get("namespace") or "default"),
        "uid": str(facts.job["metadata"].get("uid", "")),
        "pod": name,
        "node": str((pod or {}).get("spec", {}).get("nodeName", "")),
        "container": CONTAINER,
        "previous": "false",
    }
    words = {key: shlex.quote(word) for key, word in {**known, **named}.items()}
    return Cause(id, text, pods, Template(command).substitute(words) + facts.flags)


def in_order(causes: Iterable[Cause]) -> list[Cause]:
    """Sort by importance, in the order of KNOWN; merge equal causes of several pods into one."""
    found: dict[tuple[str, str], Cause] = {}
    for it in causes:
        before = found.get((it.id, it.text))
        pods = (*before.pods, *it.pods) if before else it.pods
        found[it.id, it.text] = Cause(it.id, it.text, pods, (before or it).command)
    order = list(KNOWN)
    return sorted(found.values(), key=lambda it: order.index(it.id))
