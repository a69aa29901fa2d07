"""`doctor`: the nodes that take the job's pods, and the image on them."""

from collections import Counter
from collections.abc import Iterator

from gptddp.k8s.act.patient import FAIL, OK, WARN, Check, Patient
from gptddp.k8s.objects import Object
from gptddp.k8s.render import quantity


def nodes(patient: Patient) -> Iterator[Check]:
    """How many nodes take a pod, as far as taints, labels and their whole size tell."""
    fits = [node for node in patient.nodes if not _lacks(patient, node)]
    free = [node for node in fits if not untolerated(patient, node)]
    if not free:
        yield from _none(patient, fits)
        return
    room = sum(_room(patient, node) for node in free)
    text = f"{len(free)} of {len(patient.nodes)} nodes take its pods"
    if room < patient.count:
        fix = "use fewer --replicas, smaller --cpu, --memory or --gpus, or more nodes"
        text += f", with room for {room} of {patient.count} even when they are empty"
        yield Check("nodes", WARN, text, fix)
    else:
        yield Check("nodes", OK, f"{text}; whether they have room now is not looked at")


def _none(patient: Patient, fits: list[Object]) -> Iterator[Check]:
    """Why no node takes a pod: taints, or what each of them lacks."""
    if fits:
        taints = Counter(text for node in fits for text in untolerated(patient, node))
        flags = " ".join(f"--toleration {text}" for text, _ in taints.most_common(3))
        told = ", ".join(f"{text} ({n})" for text, n in taints.most_common(3))
        yield Check("nodes", FAIL, f"taints keep its pods from every node: {told}", f"add {flags}")
        return
    lacks = Counter(what for node in patient.nodes for what in _lacks(patient, node)[:1])
    told = ", ".join(f"{what} ({n} of {len(patient.nodes)})" for what, n in lacks.most_common(3))
    fix = "ask for less with --cpu, --memory or --gpus, name another --gpu-resource, or add nodes"
    yield Check("nodes", FAIL, f"no node takes its pods: {told or 'there is none'}", fix)


def _lacks(patient: Patient, node: Object) -> list[str]:
    """What the node does not have of what a pod asks for."""
    labels = node["metadata"].get("labels") or {}
    found = [
        f"no label {key}={value}"
        for key, value in (patient.pod_spec.get("nodeSelector") or {}).items()
        if labels.get(key) != value
    ]
    has = (node.get("status") or {}).get("allocatable") or {}
    devices_first = sorted(patient.requests.items(), key=lambda it: "/" not in it[0])
    for name, amount in devices_first:
        there, wanted = quantity.number(has.get(name)), quantity.number(amount)
        if there < wanted:
            found.append(f"{name} {has[name]}, not {amount}" if there else f"no {name}")
    return found


def _room(patient: Patient, node: Object) -> int:
    has = (node.get("status") or {}).get("allocatable") or {}
    each = [
        quantity.number(has.get(name)) // wanted
        for name, amount in {**patient.requests, "pods": "1"}.items()
        if (wanted := quantity.number(amount))
    ]
    return int(min(each, default=0))


def untolerated(patient: Patient, node: Object) -> list[str]:
    """The node's taints that keep a pod of the job from it, as kubectl writes them."""
    found = [] if not node["spec"].get("unschedulable") else ["node.kubernetes.io/unschedulable"]
    for taint in node["spec"].get("taints") or []:
        if taint.get("effect") in ("NoSchedule", "NoExecute") and not any(
            _tolerates(it, taint) for it in patient.pod_spec.get("tolerations") or []
        ):
            value = f"={taint['value']}" if taint.get("value") else ""
            found.append(f"{taint['key']}{value}:{taint['effect']}")
    return list(dict.fromkeys(found))


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("tolerationSeconds") is not None:
        return False  # for a while only
    exists = toleration.get("operator") == "Exists"
    if not toleration.get("key"):
        return exists
    same = toleration["key"] == taint["key"]
    return same and (exists or (toleration.get("value") or "") == (taint.get("value") or ""))


# -- the image -----------------------------------------------------------------------------------


def image(patient: Patient) -> Iterator[Check]:
    """Is the image on the nodes, or can they pull it? What they cannot tell is not known here."""
    name = patient.pod_spec["containers"][0]["image"]
    full, named = _full_name(name)
    yield from _pull_secrets(patient)
    takes = [n for n in patient.nodes if not _lacks(patient, n) and not untolerated(patient, n)]
    has = [node for node in takes if full in _images(node)]
    if takes and len(has) == len(takes):
        yield Check("image", OK, f"{name} is on every node that takes the pods")
    elif named:
        yield Check("image", OK, f"{name} is on {len(has)} of {len(takes)} nodes; others pull it")
    else:
        text = f"{name} is on {len(has)} of {len(takes)} nodes; the others would pull {full}"
        fix = "push it to a registry and name that with --image, or load it into every node"
        yield Check("image", WARN if has or not takes else FAIL, text, fix)


def _full_name(image: str) -> tuple[str, bool]:
    """The name that a node knows an image by, and whether it names a registry."""
    first, slash, _ = image.partition("/")
    named = bool(slash) and ("." in first or ":" in first or first == "localhost")
    full = image if named else f"docker.io/{image if slash else f'library/{image}'}"
    return (full if "@" in full or ":" in full.rpartition("/")[2] else f"{full}:latest"), named


def _images(node: Object) -> set[str]:
    found = (node.get("status") or {}).get("images") or []
    return {name for it in found for name in it.get("names") or []}


def _pull_secrets(patient: Patient) -> Iterator[Check]:
    for it in patient.pod_spec.get("imagePullSecrets") or []:
        found = patient.cluster.get("Secret", it["name"])
        if found is None or found.get("type") != "kubernetes.io/dockerconfigjson":
            wrong = "is not there" if found is None else f"is of type {found.get('type')}"
            fix = f"`kubectl create secret docker-registry {it['name']} ...` makes one"
            yield Check("image", FAIL, f"the pull secret {it['name']} {wrong}", fix)
