"""Every named cause, and the command that fixes it or shows more; docs/why.md says what it means.

The most important cause comes first: `why` shows causes in the order of this table, and the table
of docs/why.md has the same one. `$pod` and the like are replaced by names; the flags that name the
cluster are appended.
"""

_JOB, _POD = "kubectl describe pytorchjob $job", "kubectl describe pod $pod"
_LOG, _TAIL = "kubectl logs $pod -c $container", "gptddp-k8s logs $job --tail 20"
_RESUME = "gptddp-k8s resume $job"
_KUEUE = "kubectl get pods -A -l app.kubernetes.io/name=kueue"
_OPERATOR = "kubectl get pods -A -l control-plane=kubeflow-training-operator"
_NODES = (
    "kubectl get nodes -o 'custom-columns=NODE:.metadata.name,TAINTS:.spec.taints[*].key,"
    "LABELS:.metadata.labels'"
)

KNOWN: dict[str, str] = {
    # no pod is created
    "pod-security": "kubectl get namespace $namespace --show-labels",
    "quota": "kubectl describe resourcequota",
    "refused": _JOB,
    "no-operator": _OPERATOR,
    # a pod does not start
    "in-vain": "gptddp-k8s suspend $job",
    "claim-missing": "kubectl get pvc",
    "claim-unbound": "kubectl describe pvc $claim",
    "no-room": "kubectl describe nodes",
    "taints": _NODES,
    "image-denied": "kubectl get pod $pod -o 'jsonpath={.spec.imagePullSecrets}'",
    "image": _POD,
    "config": "kubectl get secrets,configmaps",
    # a pod does not continue
    "evicted": "kubectl describe node $node",
    "sidecar": f"{_LOG} --tail 20",
    "out-of-memory": "kubectl get pytorchjob $job -o 'jsonpath={..containers[*].resources}'",
    "crash": f"{_LOG} --previous=$previous",
    "node-lost": "kubectl get nodes",
    "drained": _POD,
    "pod": _POD,
    "init": f"{_LOG} --tail 20",
    # the training does not continue
    "replaced": "kubectl get events --field-selector involvedObject.name=$pod",
    "not-queued": _KUEUE,
    "no-step": _TAIL,
    "left-out": _TAIL,
    "starting": "",
    # the job does not run
    "limit": _JOB,
    "failed": "gptddp-k8s logs $job",
    "failed-container": _LOG,
    "deleting": "kubectl get pytorchjob $job -o 'jsonpath={.metadata.finalizers}'",
    "held": _RESUME,
    "no-kueue": _RESUME,
    "queued": "kubectl describe workloads -l kueue.x-k8s.io/job-uid=$uid",
    "suspended": _RESUME,
}
