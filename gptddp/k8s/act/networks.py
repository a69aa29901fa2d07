"""Do the NetworkPolicies of a namespace let the pods of a job reach each other?

Policies add up: a pod that one of them selects may do what any of them allows, and nothing else.
What cannot be judged here (expressions, namespaces, addresses) is taken to allow it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from gptddp.k8s.act import lifecycle
from gptddp.k8s.objects import Object, worker_spec
from gptddp.k8s.render.companions import JOB_NAME

_RULES = {"Egress": ("egress", "to"), "Ingress": ("ingress", "from")}  # fields of each direction


def closed(
    job: Object, helpers: Iterable[Object], live: Iterable[Object]
) -> tuple[str, str] | None:
    """(what is wrong, fix) where the pods of a job are kept apart, and else None.

    helpers: what goes with the job; live: the policies of its namespace.
    """
    name = job["metadata"]["name"]
    template = worker_spec(job)["template"]
    labels = {**(template["metadata"].get("labels") or {}), JOB_NAME: name}
    own = [it for it in helpers if it["kind"] == "NetworkPolicy"]
    others = [it for it in live if not lifecycle.is_ours(it, name)]
    found = _apart([*own, *others], labels)
    if found is None:
        return None
    direction, policy = found
    text = f"the NetworkPolicy {policy} keeps the job's pods from reaching each other"
    if direction == "Egress":
        return text, (
            "apply a policy that lets the pods out to DNS and to each other, as "
            "k8s/overlays/openshift/egress.yaml of the sources does"
        )
    return text, "let the job have its own, without --without networkpolicy"


def _apart(policies: Iterable[Object], labels: Mapping[str, str]) -> tuple[str, str] | None:
    """(direction, policy) that keeps pods with these labels apart; None where they can meet."""
    selecting = [it for it in policies if _selects(it["spec"].get("podSelector"), labels)]
    for direction, (field, peers) in _RULES.items():
        closing = [it for it in selecting if direction in _directions(it["spec"])]
        rules = [rule for it in closing for rule in it["spec"].get(field) or []]
        if closing and not any(_lets_peers(rule, peers, labels) for rule in rules):
            return direction, str(closing[0]["metadata"]["name"])
    return None


def _directions(spec: Object) -> list[str]:
    """What a policy governs; by default what comes in, and what goes out if it says so."""
    default = ["Ingress", *(["Egress"] if spec.get("egress") else [])]
    return list(spec.get("policyTypes") or default)


def _selects(selector: Object | None, labels: Mapping[str, str]) -> bool:
    wanted: dict[str, Any] = selector or {}
    if wanted.get("matchExpressions"):
        return False
    return all(labels.get(k) == v for k, v in (wanted.get("matchLabels") or {}).items())


def _lets_peers(rule: Object, peers: str, labels: Mapping[str, str]) -> bool:
    """May pods with these labels talk on any port? gloo and NCCL take free ones."""
    if rule.get("ports"):
        return False
    named = rule.get(peers) or []
    return not named or any(_is_peer(peer, labels) for peer in named)


def _is_peer(peer: Object, labels: Mapping[str, str]) -> bool:
    selector = peer.get("podSelector") or {}
    if peer.get("namespaceSelector") or selector.get("matchExpressions"):
        return True
    return _selects(selector, labels)  # of an address too, which has no selector
