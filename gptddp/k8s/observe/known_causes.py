"""Every named cause: what it means, and the command that fixes it or shows more.

The most important cause comes first: `why` shows causes in the order of this table, and the table
of docs/why.md repeats it. `$pod` and the like are replaced by names; the flags that name the
cluster are appended.
"""

from typing import NamedTuple


class Known(NamedTuple):
    """What a cause means, as docs/why.md says it, and its command; some causes have none."""

    meaning: str
    command: str = ""
    mends: bool = False

    @property
    def verb(self) -> str:
        return "run" if self.mends else "see"


_JOB, _POD = "kubectl describe pytorchjob $job", "kubectl describe pod $pod"
_LOG, _TAIL = "kubectl logs $pod -c $container", "gptddp-k8s logs $job --tail 20"
_RESUME = "gptddp-k8s resume $job"
_KUEUE = "kubectl get pods -A -l app.kubernetes.io/name=kueue"
_OPERATOR = "kubectl get pods -A -l control-plane=kubeflow-training-operator"
_NODES = (
    "kubectl get nodes -o 'custom-columns=NODE:.metadata.name,TAINTS:.spec.taints[*].key,"
    "LABELS:.metadata.labels'"
)

KNOWN = {
    # no pod is created
    "pod-security": Known(
        "the namespace's Pod Security rejects the pods",
        "kubectl get namespace $namespace --show-labels"),
    "quota": Known(
        "a ResourceQuota has no room for the pods",
        "kubectl describe resourcequota"),
    "refused": Known(
        "the API server rejects the pods or their Services; `why` quotes it", _JOB),
    "no-operator": Known(
        "the training operator, or the one named in `runPolicy.managedBy`, has not reacted",
        _OPERATOR),
    # a pod does not start
    "in-vain": Known(
        "a pod is replaced again and again: its container never starts",
        "gptddp-k8s suspend $job", mends=True),
    "claim-missing": Known(
        "a PersistentVolumeClaim of the pod does not exist", "kubectl get pvc"),
    "claim-unbound": Known(
        "a PersistentVolumeClaim of the pod has no volume yet", "kubectl describe pvc $claim"),
    "no-room": Known(
        "no node has enough of a resource for the pod", "kubectl describe nodes"),
    "taints": Known(
        "nodes have taints that the pod does not tolerate, or lack labels that it needs",
        _NODES),
    "image-denied": Known(
        "the image does not exist, or the pod may not pull it",
        "kubectl get pod $pod -o 'jsonpath={.spec.imagePullSecrets}'"),
    "image": Known("the node cannot pull the image; `why` quotes it", _POD),
    "config": Known(
        "a container lacks a Secret, ConfigMap or key, or may not run as its user",
        "kubectl get secrets,configmaps"),
    # a pod does not continue
    "evicted": Known(
        "the node ended or rejected the pod: eviction, shutdown, or no healthy device",
        "kubectl describe node $node"),
    "sidecar": Known(
        "training has ended, but another container keeps the pod running", f"{_LOG} --tail 20"),
    "out-of-memory": Known(
        "a container used more memory than its limit",
        "kubectl get pytorchjob $job -o 'jsonpath={..containers[*].resources}'"),
    "crash": Known(
        "a container failed; `why` has its exit code and last message",
        f"{_LOG} --previous=$previous"),
    "node-lost": Known("the pod's node does not respond", "kubectl get nodes"),
    "drained": Known(
        "a drain, a taint or a pod of higher priority removes the pod", _POD),
    "pod": Known("any other problem with a pod; `why` quotes Kubernetes", _POD),
    "init": Known("an init container has not finished", f"{_LOG} --tail 20"),
    # the training does not continue
    "replaced": Known(
        "a pod was just lost, or is lost repeatedly",
        "kubectl get events --field-selector involvedObject.name=$pod"),
    "not-queued": Known("the job names a queue, but Kueue does not manage it", _KUEUE),
    "no-step": Known("the pods run, but no step has been logged for minutes", _TAIL),
    "left-out": Known("all pods run, but the training continues without some of them", _TAIL),
    "starting": Known("nothing is wrong: pods are being created or started"),
    # the job does not run
    "limit": Known(
        "the job has reached a limit in its `runPolicy`",
        _JOB),
    "failed": Known("a pod's exit code made the job fail", "gptddp-k8s logs $job"),
    "failed-container": Known("a container other than the trainer's made the job fail", _LOG),
    "deleting": Known(
        "the job is being deleted: its pods stop, or a finalizer holds it",
        "kubectl get pytorchjob $job -o 'jsonpath={.metadata.finalizers}'"),
    "held": Known(
        "`gptddp-k8s suspend` or Kueue took the job out of its queue until you resume it",
        _RESUME, mends=True),
    "no-kueue": Known(
        "the job waits for its queue, but the cluster has no Kueue", _RESUME, mends=True),
    "queued": Known(
        "the job waits in its queue; `why` quotes Kueue",
        "kubectl describe workloads -l kueue.x-k8s.io/job-uid=$uid"),
    "suspended": Known(
        "the job has no queue, and `runPolicy.suspend` is true; or a local job was stopped",
        _RESUME, mends=True),
}  # fmt: skip
