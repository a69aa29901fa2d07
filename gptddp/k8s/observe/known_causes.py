"""Every cause that has a name: what it means, and the command that mends it or shows more.

The most important cause comes first: `why` shows what it finds in the order of this table, and
docs/why.md is made of it. `$pod` and the like become names; the flags that name the cluster are
appended.
"""

from typing import NamedTuple


class Known(NamedTuple):
    """What a cause means, in a sentence of the page, and its command, which may be none."""

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
        "the namespace's Pod Security refuses the pods; those of `render` pass `restricted`",
        "kubectl get namespace $namespace --show-labels"),
    "quota": Known(
        "a ResourceQuota of the namespace has no room for the pods",
        "kubectl describe resourcequota"),
    "refused": Known(
        "the API server refuses the pods or their services, in the server's words", _JOB),
    "no-operator": Known(
        "no training operator reacts to the job, or not the one of `runPolicy.managedBy`",
        _OPERATOR),
    # a pod does not start
    "in-vain": Known(
        "a pod is made again and again, and its container never starts",
        "gptddp-k8s suspend $job", mends=True),
    "claim-missing": Known(
        "a PersistentVolumeClaim that the pod names does not exist", "kubectl get pvc"),
    "claim-unbound": Known(
        "a PersistentVolumeClaim has no volume yet", "kubectl describe pvc $claim"),
    "no-room": Known(
        "no node has as much of a resource free as the pod requests", "kubectl describe nodes"),
    "taints": Known(
        "the nodes have taints that the pod does not tolerate, or not the labels that it wants",
        _NODES),
    "image-denied": Known(
        "the registry does not let the pod pull the image",
        "kubectl get pod $pod -o 'jsonpath={.spec.imagePullSecrets}'"),
    "image": Known("the image cannot be pulled, in the node's words", _POD),
    "config": Known(
        "a Secret, a ConfigMap or a key that a container needs is missing, or its user is refused",
        "kubectl get secrets,configmaps"),
    # a pod does not go on
    "evicted": Known(
        "the node has ended or refused the pod: evicted, shut down, or without a healthy device",
        "kubectl describe node $node"),
    "sidecar": Known(
        "the training has ended, and another container keeps its pod alive", f"{_LOG} --tail 20"),
    "out-of-memory": Known(
        "a container has used more memory than its limit",
        "kubectl get pytorchjob $job -o 'jsonpath={..containers[*].resources}'"),
    "crash": Known(
        "a container has ended with an error: its exit code's meaning, and its last words",
        f"{_LOG} --previous=$previous"),
    "node-lost": Known("the pod's node does not answer", "kubectl get nodes"),
    "drained": Known(
        "the pod is taken off its node: by a drain, a taint, or a pod of a higher priority", _POD),
    "pod": Known("anything else that Kubernetes says of a pod, in its own words", _POD),
    "init": Known("an init container has not ended", f"{_LOG} --tail 20"),
    # the training does not go on
    "replaced": Known(
        "a pod was lost a moment ago, or is lost again and again",
        "kubectl get events --field-selector involvedObject.name=$pod"),
    "not-queued": Known("Kueue does not hold the job, which names one of its queues", _KUEUE),
    "no-step": Known("the pods run, and no step is logged for minutes", _TAIL),
    "left-out": Known("all pods run, and the training goes on without some of them", _TAIL),
    "starting": Known("nothing is wrong: its pods are being created or started"),
    # the job does not run
    "limit": Known(
        "the job has reached a limit of its `runPolicy`",
        _JOB),
    "failed": Known("the exit code of a pod has failed the job", "gptddp-k8s logs $job"),
    "failed-container": Known("another container than the training's has failed the job", _LOG),
    "deleting": Known(
        "the job is being deleted: its pods stop, or a finalizer keeps it",
        "kubectl get pytorchjob $job -o 'jsonpath={.metadata.finalizers}'"),
    "held": Known(
        "the job was taken out of its queue: by `suspend`, or by Kueue for good",
        _RESUME, mends=True),
    "no-kueue": Known(
        "the job waits in a queue, and the cluster has no Kueue", _RESUME, mends=True),
    "queued": Known(
        "the job waits in its queue, in Kueue's words",
        "kubectl describe workloads -l kueue.x-k8s.io/job-uid=$uid"),
    "suspended": Known("`runPolicy.suspend` is true", _RESUME, mends=True),
}  # fmt: skip
