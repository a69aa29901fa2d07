"""Do the NetworkPolicies of a namespace let the pods of a job reach each other?

Policies add up: a selected pod may do what any of its policies allows, and nothing else. Parts that
are not evaluated here (expressions, namespaces, addresses) count as allowing it.
"""

from collections.abc import Iterable, Mapping

from gptddp.k8s.act.needs import Lack
from gptddp.k8s.objects import Object, is_ours, replica_count, worker_spec
from gptddp.k8s.render.companions import JOB_NAME

_RULES = {"Egress": ("egress", "to"), "Ingress": ("ingress", "from")}  # fields of each direction


def closed(job: Object, helpers: Iterable[Object], live: Iterable[Object]) -> Lack | None:
    """The policy that keeps the pods of a job apart: they would silently wait for their peers.

    helpers: the job's companions; live: the policies of its namespace.
    """
    name, role = job["metadata"]["name"], worker_spec(job)
    if replica_count(role) == 1:
        return None
    labels = {**(role["template"]["metadata"].get("labels") or {}), JOB_NAME: name}
    own = [it for it in helpers if it["kind"] == "NetworkPolicy"]
    policies = [*own, *(it for it in live if not is_ours(it, name))]
    selecting = [it for it in policies if _selects(it["spec"].get("podSelector"), labels)]
    for direction, (field, peers) in _RULES.items():
        closing = [it for it in selecting if direction in _directions(it["spec"])]
        rules = [rule for it in closing for rule in it["spec"].get(field) or []]
        if closing and not any(_lets_peers(rule, peers, labels) for rule in rules):
            return Lack(
                f"the NetworkPolicy {closing[0]['metadata']['name']} keeps the job's pods from "
                "reaching each other, where the network enforces it",
                f"add a NetworkPolicy whose {field} allows all ports between pods with the label "
                f"{JOB_NAME}={name}",
                fatal=False,
            )
    return None


def _directions(spec: Object) -> list[str]:
    """The directions of a policy; default: Ingress, and Egress if it has egress rules."""
    default = ["Ingress", *(["Egress"] if spec.get("egress") else [])]
    return list(spec.get("policyTypes") or default)


def _selects(selector: Object | None, labels: Mapping[str, str]) -> bool:
    wanted = selector or {}
    if wanted.get("matchExpressions"):
        return False
    return all(labels.get(k) == v for k, v in (wanted.get("matchLabels") or {}).items())


def _lets_peers(rule: Object, peers: str, labels: Mapping[str, str]) -> bool:
    """May pods with these labels talk on any port? gloo and NCCL use any free port."""
    named = rule.get(peers) or []
    return not rule.get("ports") and (not named or any(_is_peer(peer, labels) for peer in named))


def _is_peer(peer: Object, labels: Mapping[str, str]) -> bool:
    selector = peer.get("podSelector") or {}
    if peer.get("namespaceSelector") or selector.get("matchExpressions"):
        return True
    return _selects(selector, labels)  # an address has no selector: True
