"""One thing that keeps pods from running: its id, a sentence, and the command for it."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Template

from gptddp.k8s.objects import Object
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.known_causes import KNOWN
from gptddp.k8s.observe.pod_log import CONTAINER


@dataclass(frozen=True)
class Cause:
    """One thing that keeps pods from running.

    `text` names the object and the field; `command` shows the rest, or mends it.
    """

    id: str
    text: str
    pods: tuple[str, ...] = ()
    command: str = ""

    @property
    def sentence(self) -> str:
        after = f"; {KNOWN[self.id].verb} `{self.command}`" if self.command else ""
        if not self.pods:
            return f"{self.text}{after}"
        first = ", ".join(self.pods[:3]) + (" and more" if len(self.pods) > 3 else "")
        return f"{'pod' if len(self.pods) == 1 else 'pods'} {first}: {self.text}{after}"


def cause(
    facts: Facts,
    id: str,
    text: str,
    *,
    pod: Object | None = None,
    name: str = "",
    named: Mapping[str, str] | None = None,
) -> Cause:
    """A cause with its command for this job, pod and cluster.

    `name`: of a pod that is gone. `named`: what else the command names, as a claim.
    """
    pods = (str(pod["metadata"]["name"]) if pod else name,) if pod or name else ()
    if facts.local:  # no cluster is asked, and what there is to say is in the text
        return Cause(id, text, pods)
    namespace = facts.job["metadata"].get("namespace") or "default"
    node = pod.get("spec", {}).get("nodeName", "") if pod else ""
    known = {
        "job": facts.name,
        "namespace": namespace,
        "pod": "".join(pods),
        "node": node,
        "container": CONTAINER,
    }
    template = KNOWN[id].command
    if "$node" in template and not node:  # of a pod that is gone
        template = "kubectl get nodes"
    if facts.job.get("kind") == "Job":  # of `prepare` and `sample`
        template = template.replace("pytorchjob", "job")
    words = {key: shlex.quote(word) for key, word in {**known, **(named or {})}.items()}
    command = Template(template).substitute(words)
    return Cause(id, text, pods, command + facts.flags if command else "")


def merged(causes: Sequence[Cause]) -> list[Cause]:
    """Those that say the same of several pods as one, with the command for the first."""
    found: dict[tuple[str, str], Cause] = {}
    for it in causes:
        key = (it.id, it.text)
        before = found.get(key)
        pods = (*before.pods, *it.pods) if before else it.pods
        found[key] = Cause(it.id, it.text, pods, before.command if before else it.command)
    return list(found.values())
