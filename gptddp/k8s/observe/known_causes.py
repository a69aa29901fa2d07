"""Every cause that `why` knows: what it means, and the command that shows more of it or mends it.

A table of data; docs/why.md is made of it. `$pod` and the like become names; the flags that name
the cluster are appended.
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


_POD = "kubectl describe pod $pod"
_NODES = "kubectl get nodes"
_LABELS = (
    f"{_NODES} -o 'custom-columns=NODE:.metadata.name,TAINTS:.spec.taints[*].key,"
    "LABELS:.metadata.labels'"
)
_EVENTS = "kubectl get events --field-selector involvedObject.name=$pod"
_TEMPLATE = "kubectl get pytorchjob $job -o yaml"

# -- the job and its pods' creation --------------------------------------------------------------
_JOB = {
    "pod-security": Known(
        "the namespace's Pod Security refuses the pods",
        "kubectl get namespace $namespace --show-labels",
    ),
    "quota": Known(
        "a ResourceQuota of the namespace has no room for the pods",
        "kubectl describe resourcequota $quota",
    ),
    "quota-unstated": Known(
        "a ResourceQuota wants a request or a limit that the pods do not state",
        "kubectl describe resourcequota $quota",
    ),
    "limit-range": Known(
        "a LimitRange of the namespace allows less, or wants more, than the pods state",
        "kubectl describe limitrange",
    ),
    "service-account-missing": Known(
        "the pods name a ServiceAccount that does not exist",
        "kubectl create serviceaccount $account",
        mends=True,
    ),
    "priority-class-missing": Known(
        "the pods name a PriorityClass that does not exist", "kubectl get priorityclasses"
    ),
    "runtime-class-missing": Known(
        "the pods name a RuntimeClass that does not exist", "kubectl get runtimeclasses"
    ),
    "webhook": Known(
        "an admission webhook refuses the pods, or does not answer",
        "kubectl get validatingwebhookconfigurations,mutatingwebhookconfigurations",
    ),
    "policy": Known(
        "a ValidatingAdmissionPolicy refuses the pods",
        "kubectl get validatingadmissionpolicies,validatingadmissionpolicybindings",
    ),
    "pod-invalid": Known("a field of the pod template has a value that no pod may have", _TEMPLATE),
    "namespace-ending": Known(
        "the namespace is being deleted", "kubectl get namespace $namespace -o yaml"
    ),
    "pods-refused": Known(
        "the API server refuses the pods for another reason", "kubectl describe pytorchjob $job"
    ),
    "service-refused": Known(
        "the API server refuses the pods' services, as for a name that is too long",
        "kubectl describe pytorchjob $job",
    ),
    "no-operator": Known(
        "no training operator reacts to the job",
        "kubectl get pods -A -l control-plane=kubeflow-training-operator",
    ),
    "managed-elsewhere": Known(
        "`runPolicy.managedBy` names another controller, which has not taken the job up",
        "kubectl get pytorchjob $job -o 'jsonpath={.spec.runPolicy.managedBy}'",
    ),
    "suspended": Known("`runPolicy.suspend` is true", "gptddp-k8s resume $job", mends=True),
    "deleting": Known(
        "the job is being deleted, and its pods stop",
        "kubectl get pods -l training.kubeflow.org/job-name=$job",
    ),
    "failed": Known("a pod's exit code has failed the job", "gptddp-k8s logs $job"),
    "failed-container": Known(
        "another container than that of the training has failed the job",
        "kubectl logs $pod -c $container",
    ),
    "limit": Known(
        "`runPolicy.backoffLimit` or `runPolicy.activeDeadlineSeconds` is reached",
        "kubectl get pytorchjob $job -o 'jsonpath={.spec.runPolicy}'",
    ),
    "given-up": Known(
        "a waiting command has failed the job: its pods were replaced in vain",
        "kubectl describe pytorchjob $job",
    ),
    "in-vain": Known(
        "a pod is replaced again and again before its container starts",
        "gptddp-k8s suspend $job",
        mends=True,
    ),
    "replaced": Known("a pod was lost a moment ago, or is lost again and again", _EVENTS),
    "no-step": Known(
        "the pods run, and no step is logged for minutes", "gptddp-k8s logs $job --tail 20"
    ),
    "left-out": Known(
        "all pods run, and the training goes on without some of them",
        "gptddp-k8s logs $job --tail 20",
    ),
    "starting": Known("nothing is wrong: its pods are being created or started"),
}

# -- the scheduler -------------------------------------------------------------------------------
_SCHEDULING = {
    "no-room": Known(
        "no node has as much of a resource free as the pod requests", "kubectl describe nodes"
    ),
    "too-many-pods": Known("every node has as many pods as it may", "kubectl describe nodes"),
    "taints": Known(
        "the nodes have taints that the pod does not tolerate",
        _LABELS,
    ),
    "node-selector": Known(
        "no node has the labels of the pod's `nodeSelector` or node affinity",
        _LABELS,
    ),
    "pod-affinity": Known(
        "the pod's (anti-)affinity to other pods, or its spread, leaves no node",
        "kubectl get pods -o wide",
    ),
    "cordoned": Known("the nodes are closed to new pods (cordoned)", _NODES),
    "nodes-not-ready": Known("the nodes are not ready", _NODES),
    "host-port": Known(
        "a `hostPort` of the pod is taken on every node", "kubectl get pods -A -o wide"
    ),
    "preempted": Known(
        "a pod of a higher priority has taken the pod's place", "kubectl get priorityclasses"
    ),
    "preempting": Known("the pod waits until those that it preempts have ended", _POD),
    "gated": Known(
        "a scheduling gate holds the pod back, as a queue's",
        "kubectl get pod $pod -o 'jsonpath={.spec.schedulingGates}'",
    ),
    "no-scheduler": Known(
        "the pod's `schedulerName` is of a scheduler that does not run",
        "kubectl get pod $pod -o 'jsonpath={.spec.schedulerName}'",
    ),
    "unschedulable": Known("no node takes the pod for another reason", _POD),
}

# -- images and containers -----------------------------------------------------------------------
_CONTAINERS = {
    "image-name": Known("the image's name is not one", _TEMPLATE),
    "image-never": Known(
        "`imagePullPolicy` is Never, and the node has no such image",
        "kubectl get node $node -o 'jsonpath={.status.images[*].names}'",
    ),
    "image-denied": Known(
        "the registry does not let the pod pull the image",
        "kubectl get pod $pod -o 'jsonpath={.spec.imagePullSecrets}'",
    ),
    "image-platform": Known(
        "the image is not for the node's processor",
        f"{_NODES} -L kubernetes.io/arch",
    ),
    "image-unreachable": Known("the node cannot reach the image's registry", _POD),
    "image": Known("the image cannot be pulled for another reason", _POD),
    "pulling": Known("the node is still pulling the image", _POD),
    "secret-missing": Known(
        "a container needs a Secret that does not exist", "kubectl get secrets"
    ),
    "configmap-missing": Known(
        "a container needs a ConfigMap that does not exist", "kubectl get configmaps"
    ),
    "key-missing": Known(
        "a Secret or ConfigMap has not the key that a container needs",
        "kubectl describe $kind $object",
    ),
    "run-as-root": Known(
        "`runAsNonRoot` is set, and the image's user is root",
        "kubectl get pod $pod -o 'jsonpath={..securityContext}'",
    ),
    "command": Known(
        "the container's command is not in the image, or cannot be run there",
        "kubectl get pytorchjob $job -o 'jsonpath={..containers[*].command}'",
    ),
    "container": Known("a container cannot be made or started for another reason", _POD),
    "out-of-memory": Known(
        "a container has used more memory than its limit",
        "kubectl get pytorchjob $job -o 'jsonpath={..containers[*].resources}'",
    ),
    "read-only": Known(
        "the program writes where its container may not: `readOnlyRootFilesystem` or a read-only "
        "volume",
        "kubectl get pytorchjob $job -o 'jsonpath={..containers[*].securityContext} "
        "{..containers[*].volumeMounts}'",
    ),
    "permission": Known(
        "the program's user may not read or write a file, as on a volume of another owner",
        "kubectl get pytorchjob $job -o 'jsonpath={..securityContext}'",
    ),
    "disk-full": Known("a volume or the node's disk is full", _POD),
    "crash-loop": Known(
        "a container ends badly again and again, and waits to start",
        "kubectl logs $pod -c $container --previous",
    ),
    "crash": Known("a container has ended badly", "kubectl logs $pod -c $container"),
    "probe": Known("a probe of a container fails", _POD),
    "hook": Known("a container's postStart hook fails, which ends the container", _POD),
    "readiness-gate": Known("a readiness gate of the pod is not met", _POD),
    "init": Known(
        "an init container has not ended, or has failed", "kubectl logs $pod -c $container"
    ),
    "sidecar": Known(
        "the training has ended, and another container keeps its pod alive",
        "kubectl logs $pod -c $container --tail 20",
    ),
}

# -- nodes and volumes ---------------------------------------------------------------------------
_NODES_AND_VOLUMES = {
    "rejected": Known(
        "the node's kubelet rejects the pod (`OutOfcpu`, `OutOfnvidia.com/gpu`, "
        "`UnexpectedAdmissionError`, `TopologyAffinityError`, `NodeAffinity`)",
        "kubectl describe node $node",
    ),
    "node-shutdown": Known("the pod's node shuts down, as spot nodes do", f"{_NODES} $node"),
    "drained": Known("the pod was evicted through the API, as by a drain", _NODES),
    "tainted": Known(
        "the pod's node got a taint (NoExecute) that the pod does not tolerate", _NODES
    ),
    "evicted": Known(
        "the node was short of memory, disk or processes, and evicted the pod",
        "kubectl describe node $node",
    ),
    "evicted-storage": Known(
        "the pod used more local storage than its limit, and was evicted", _EVENTS
    ),
    "pod-deadline": Known("the pod's own `activeDeadlineSeconds` is over", _TEMPLATE),
    "node-lost": Known(
        "a pod is to be gone, and its node does not answer", "kubectl describe node $node"
    ),
    "not-taken-up": Known("the pod has a node, and no kubelet there has taken it up", _NODES),
    "finalizers": Known(
        "finalizers keep a pod, or the job, that is to be gone",
        "kubectl get $kind $object -o 'jsonpath={.metadata.finalizers}'",
    ),
    "node-silent": Known("the pod's node has not been heard from", "kubectl describe node $node"),
    "addresses": Known("the node or its network has no free address for a pod", _POD),
    "sandbox": Known("the node cannot make the pod's network or sandbox", _POD),
    "claim-missing": Known(
        "the pod names a PersistentVolumeClaim that does not exist", "kubectl get pvc"
    ),
    "claim-unbound": Known(
        "a PersistentVolumeClaim has no volume yet", "kubectl describe pvc $claim"
    ),
    "claim-lost": Known(
        "a PersistentVolumeClaim has lost its volume, or is being deleted", "kubectl get pvc"
    ),
    "claim-elsewhere": Known(
        "the claim's volume is bound to other nodes or zones", "kubectl describe pvc $claim"
    ),
    "volume-in-use": Known(
        "the claim's volume is attached to another node (ReadWriteOnce)", "kubectl get pvc"
    ),
    "volume": Known("a volume does not mount for another reason", _POD),
}

# -- a queue of Kueue ----------------------------------------------------------------------------
_WORKLOAD = "kubectl describe workloads -l kueue.x-k8s.io/job-uid=$uid"
_CLUSTER_QUEUE = "kubectl describe clusterqueue $cluster_queue"
_QUEUES = {
    "queued": Known("the job waits for its turn, or for others to end", _WORKLOAD),
    "queue-preempted": Known(
        "the job was stopped for one of a higher priority, and waits for its turn again", _WORKLOAD
    ),
    "queue-evicted": Known(
        "Kueue has stopped the job, as for pods that were not ready in time; it waits again",
        _WORKLOAD,
    ),
    "admission-check": Known(
        "the job has its quota, and waits for an admission check of its ClusterQueue", _WORKLOAD
    ),
    "quota-too-small": Known(
        "the job asks for more than the ClusterQueue ever has", _CLUSTER_QUEUE
    ),
    "quota-none": Known(
        "the ClusterQueue has no quota of a resource that the pods ask for", _CLUSTER_QUEUE
    ),
    "queue-closed": Known("the ClusterQueue is not for jobs of this namespace", _CLUSTER_QUEUE),
    "queue-topology": Known(
        "no nodes of the ClusterQueue fit the topology that the job asks for", _WORKLOAD
    ),
    "queue-flavor": Known(
        "the pods do not tolerate, or do not select, the nodes of the ClusterQueue", _WORKLOAD
    ),
    "local-queue-missing": Known(
        "the LocalQueue that the job names does not exist, or it has to name one",
        "kubectl get localqueues",
    ),
    "local-queue-stopped": Known(
        "the LocalQueue is stopped",
        """kubectl patch localqueue $queue --type merge -p '{"spec": {"stopPolicy": "None"}}'""",
        mends=True,
    ),
    "cluster-queue-missing": Known(
        "the ClusterQueue that the LocalQueue names does not exist", "kubectl get clusterqueues"
    ),
    "cluster-queue-inactive": Known(
        "the ClusterQueue is stopped, or lacks a flavor or an admission check", _CLUSTER_QUEUE
    ),
    "queue-priority-missing": Known(
        "the WorkloadPriorityClass that the job names does not exist",
        "kubectl get workloadpriorityclasses",
    ),
    "held": Known(
        "the job was taken out of its queue: by `suspend`, or by Kueue for good",
        "gptddp-k8s resume $job",
        mends=True,
    ),
    "queue-given-up": Known(
        "Kueue cannot set labels, annotations or nodes of the pods, as the job has others there",
        "kubectl get pytorchjob $job -o 'jsonpath={..template.metadata} {..nodeSelector}'",
    ),
    "no-workload": Known(
        "Kueue has not put the job into its queue",
        "kubectl get pods -A -l app.kubernetes.io/name=kueue",
    ),
    "no-kueue": Known(
        "the job names a queue, is suspended, and the cluster has no Kueue",
        "gptddp-k8s resume $job",
        mends=True,
    ),
    "not-queued": Known(
        "the job runs outside of the queue that it names: its cluster's Kueue, if there is one, "
        "does not hold PyTorchJobs",
        "kubectl get pods -A -l app.kubernetes.io/name=kueue",
    ),
}

KNOWN = {**_JOB, **_SCHEDULING, **_CONTAINERS, **_NODES_AND_VOLUMES, **_QUEUES}
