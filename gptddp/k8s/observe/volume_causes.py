"""Pods on a node whose volumes cannot be mounted."""

import re
from collections.abc import Iterator

from gptddp.k8s.objects import container_statuses, volume_claims
from gptddp.k8s.observe.cause import Cause, cause
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.render import code_volume

_MISSING = re.compile(r'(secret|configmap) "([^"]+)" not found')
_KEY = re.compile(r"references non-existent (secret|config) key: (\S+)")


def volume(facts: Facts) -> Iterator[Cause]:
    """A scheduled pod whose volumes cannot be mounted."""
    for pod in facts.pods:
        if not any("waiting" in (c.get("state") or {}) for c in container_statuses(pod)):
            continue
        if event := facts.unsolved(pod, "FailedMount", "FailedAttachVolume"):
            message = str(event.get("message", ""))
            text = f"its volumes do not mount (spec.volumes): {message}"
            where = re.search(r'volume "([^"]+)"', message)
            if found := _MISSING.search(message):
                if where and where[1] == code_volume.VOLUME:
                    text += "; the same submit, with its --code, makes it again"
                yield cause(facts, f"{found[1]}-missing", text, pod=pod)
            elif (found := _KEY.search(message)) and where:
                kind = "secret" if found[1] == "secret" else "configmap"
                named = {"kind": kind, "object": _source(pod, where[1])}
                yield cause(facts, "key-missing", text, pod=pod, named=named)
            elif "Multi-Attach" in message:
                claims = ", ".join(claim for _, claim in volume_claims(pod.get("spec", {})))
                text = f"its volume is attached to another node, and ReadWriteOnce ({claims})"
                yield cause(facts, "volume-in-use", f"{text}: {message}", pod=pod)
            else:
                yield cause(facts, "volume", text, pod=pod)


def _source(pod: dict[str, object], volume_name: str) -> str:
    """The Secret or ConfigMap that a volume of a pod is made of."""
    spec = pod.get("spec", {})
    assert isinstance(spec, dict)
    for it in spec.get("volumes") or []:
        if it["name"] == volume_name:
            secret, config_map = it.get("secret") or {}, it.get("configMap") or {}
            return str(secret.get("secretName") or config_map.get("name") or volume_name)
    return volume_name
