"""`doctor`: what the namespace gives a job: volumes, quota, a queue, and a closed network."""

from collections.abc import Iterator

from gptddp.errors import ClusterError, ConfigError
from gptddp.k8s.act import needs, networks, queueing
from gptddp.k8s.act.patient import FAIL, OK, WARN, Check, Patient
from gptddp.k8s.cluster import group_and_plural
from gptddp.k8s.objects import QUEUE, Object, volume_claims
from gptddp.k8s.render import companions, quantity

# -- volumes -------------------------------------------------------------------------------------


def volumes(patient: Patient) -> Iterator[Check]:
    """Claims that all pods of the job can mount at once, on several nodes."""
    found = list(needs.claims(patient.cluster, patient.pod_spec, patient.count))
    for lack in found:
        yield Check("volumes", FAIL, lack.text, lack.fix)
    if found:
        return
    for _, name in volume_claims(patient.pod_spec):
        if claim := patient.cluster.get("PersistentVolumeClaim", name):
            yield _claim(patient, claim)


def _claim(patient: Patient, claim: Object) -> Check:
    """A claim that the pods can use, as far as it says."""
    name, modes = claim["metadata"]["name"], "/".join(claim["spec"].get("accessModes") or [])
    if (claim.get("status") or {}).get("phase") == "Pending":
        fix = f"`kubectl describe pvc {name} -n {patient.cluster.namespace}` says what it waits for"
        return Check("volumes", WARN, f"the claim {name} has no volume yet", fix)
    if patient.count > 1 and (local := _local(patient, claim)):
        fix = "`doctor --probe` tries it; else use a shared file system, or name another claim"
        return Check("volumes", WARN, f"the claim {name} is {modes}, but {local}", fix)
    return Check("volumes", OK, f"the claim {name} is {modes}")


def _local(patient: Patient, claim: Object) -> str:
    """Why a volume may be another one on each node, whatever its claim says; empty if it is not."""
    name = claim["spec"].get("volumeName")
    try:
        volume = patient.cluster.ask(f"/api/v1/persistentvolumes/{name}") if name else {}
    except ClusterError:  # volumes are the cluster's: few may see them
        return ""
    spec = volume.get("spec") or {}
    if "local" in spec:
        return "its volume is a disk of one node"
    return "its volume is a folder of each node (hostPath)" if "hostPath" in spec else ""


# -- quota ---------------------------------------------------------------------------------------


def quota(patient: Patient) -> Iterator[Check]:
    """What is left of each ResourceQuota, against what all pods of the job ask for."""
    if patient.cluster.get(patient.job["kind"], patient.job["metadata"]["name"]) is not None:
        yield Check("quota", OK, "not looked at: the job exists, and is counted already")
        return
    wanted, short, seen = _wanted(patient), [], False
    for it in patient.here("api/v1", "resourcequotas"):
        if it["spec"].get("scopes") or it["spec"].get("scopeSelector"):
            continue  # of some pods only
        seen = True
        status = it.get("status") or {}
        for key, hard in (status.get("hard") or it["spec"].get("hard") or {}).items():
            used = (status.get("used") or {}).get(key, "0")
            left = quantity.number(hard) - quantity.number(used)
            if (need := wanted.get(key, 0)) > max(0, left):
                needs = quantity.like(need, str(hard))
                name = it["metadata"]["name"]
                text = f"{key}: {used} of {hard} used, the job needs {needs} ({name})"
                short.append(_short(key, text))
    yield from short
    if not short:
        yield Check("quota", OK, "there is room for the job" if seen else "there is none")


def _short(resource: str, text: str) -> Check:
    """Too little of a quota: nothing of the pods, of what is beside them, or of the key only."""
    if resource in ("secrets", "count/secrets"):
        fix = "ask for more quota: the job runs without a key for its rendezvous"
        fix += " (docs/security.md of the sources)"
        return Check("quota", WARN, text, fix)
    for kind in companions.KINDS:
        if resource == _counted(kind):
            fix = f"ask for more quota, or leave it out: --without {kind.lower()}"
            return Check("quota", FAIL, text, fix)
    fix = "use fewer --replicas, smaller --cpu, --memory or --gpus, or ask for more quota"
    return Check("quota", FAIL, text, fix)


def _counted(kind: str) -> str:
    """What a quota calls the number of objects of a kind: `count/PLURAL.GROUP`."""
    group, plural = group_and_plural(kind)
    return ".".join(filter(None, [f"count/{plural}", group]))


def _wanted(patient: Patient) -> dict[str, float]:
    """What all pods count for in a quota, with the Service of each, and what is beside them."""
    count = float(patient.count)
    found = {"pods": count, "count/pods": count, "services": count, "count/services": count}
    for kind in (patient.job["kind"], "Secret", *(it["kind"] for it in patient.helpers)):
        found[_counted(kind)] = 1.0
    found["secrets"], found["configmaps"] = 1.0, found.get("count/configmaps", 0.0)
    resources = patient.pod_spec["containers"][0].get("resources") or {}
    for part in ("requests", "limits"):
        for name, amount in (resources.get(part) or {}).items():
            found[f"{part}.{name}"] = count * quantity.number(amount)
            if part == "requests" and name in ("cpu", "memory"):
                found[name] = found[f"{part}.{name}"]
    return found


# -- queue ---------------------------------------------------------------------------------------


def queue(patient: Patient) -> Iterator[Check]:
    """The job's LocalQueue and that it admits jobs; or whether the namespace has one to use."""
    name = (patient.job["metadata"].get("labels") or {}).get(QUEUE)
    try:
        found = patient.cluster.find("LocalQueue")
    except ClusterError as error:
        if error.status != 404 and (name or error.status != 403):
            raise
        if name:
            fix = "leave out --queue, or install Kueue"
            yield Check("queue", FAIL, f"--queue {name}: the cluster has no Kueue", fix)
        return
    names = ", ".join(it["metadata"]["name"] for it in found)
    mine = next((it for it in found if it["metadata"]["name"] == name), None)
    if name and mine is None:
        fix = f"use --queue with one of {names}" if names else "ask for a LocalQueue here"
        yield Check("queue", FAIL, f"there is no LocalQueue {name} in the namespace", fix)
    elif mine is not None:
        yield _queue(patient, mine)
    elif names:
        text = f"the namespace has queues ({names}), and the job is in none"
        yield Check("queue", WARN, text, "add --queue, unless jobs may run outside of queues")


def _queue(patient: Patient, found: Object) -> Check:
    """Does the queue admit jobs, and this one too? As `submit` asks."""
    cluster, name = patient.cluster, found["metadata"]["name"]
    if trouble := queueing.closed(found):
        fix = f"`kubectl describe localqueue {name} -n {cluster.namespace}` and who administers it"
        return Check("queue", FAIL, trouble, f"{fix} say more")
    try:
        answer = cluster.create(patient.job, dry_run=True)
    except ClusterError:
        answer = patient.job  # said by the webhook, or by the rights; or the job exists
    try:
        queueing.check(cluster, patient.job, answer, lambda line: None)
    except ConfigError as error:
        what, _, fix = str(error).partition("; ")
        return Check("queue", FAIL, what, fix or "leave it out, or use another")
    return Check("queue", OK, f"the LocalQueue {name} admits jobs")


# -- network -------------------------------------------------------------------------------------

_ENFORCE = (
    "calico", "canal", "cilium", "antrea", "weave", "kube-router", "kindnet", "ovnkube", "anetd",
    "azure-npm", "kube-network-policies", "romana",
)  # fmt: skip
_AWS_AGENT = "aws-eks-nodeagent"  # the part of aws-node that enforces policies


def network(patient: Patient) -> Iterator[Check]:
    """Is the job's NetworkPolicy enforced, and do others of the namespace keep its pods apart?"""
    yield from _denied(patient)
    if not any(it["kind"] == "NetworkPolicy" for it in patient.helpers):
        return
    found = patient.items("/apis/apps/v1/daemonsets")
    names = [it["metadata"]["name"] for it in found if _enforces(it)]
    if names:
        yield Check("network", OK, f"{names[0]} enforces NetworkPolicies")
    else:
        text = "no network plug-in is known here that enforces NetworkPolicies"
        fix = "install one, such as Calico or Cilium; until then every pod of the cluster reaches"
        fix += " the job's ports (docs/security.md of the sources)"
        yield Check("network", WARN, text, fix)


def _enforces(daemon_set: Object) -> bool:
    name = daemon_set["metadata"]["name"]
    containers = daemon_set["spec"]["template"]["spec"].get("containers") or []
    agent = any(it.get("name") == _AWS_AGENT for it in containers)
    return agent or any(word in name for word in _ENFORCE)


def _denied(patient: Patient) -> Iterator[Check]:
    """A policy that keeps the job's pods apart, which the job's own does not change."""
    live = patient.here("apis/networking.k8s.io/v1", "networkpolicies")
    if found := networks.closed(patient.job, patient.helpers, live):
        yield Check("network", FAIL, found.text, found.fix)
