"""PyTorchJobs with one field that is odd: what the API server makes of it, and a word of ours.

A cluster test asks a real server about every one of them.
"""

import copy
import re

from support.manifests import render_job

WORKER = "spec.pytorchReplicaSpecs.Worker"
POD = f"{WORKER}.template.spec"
CONTAINER = f"{POD}.containers.0"

# (field, value, words of the message)
REFUSED = [
    (f"{WORKER}.replica", 4, "did you mean 'replicas'?"),
    (f"{WORKER}.Replicas", 4, "did you mean 'replicas'?"),
    ("metadata.creationTimestamp", "yesterday", "as in 2026-01-31T12:00:00Z"),
    ("metadata.creationTimestamp", "2026-01-31T12:00:00", "a string, stands where a time must be"),
    ("spec.cleanPodPolicy", "All", "it belongs to spec.runPolicy.cleanPodPolicy"),
    ("spec.replicas", 4, "it belongs to spec.pytorchReplicaSpecs.Worker.replicas"),
    (f"{POD}.image", "x", f"it belongs to {POD}.containers[].image"),
    (f"{CONTAINER}.volumes", [], f"it belongs to {POD}.volumes"),
    (f"{CONTAINER}.gpus", 1, "unknown field; remove it"),
    ("spec.foo", 1, "known are elasticPolicy, nprocPerNode"),
    ("foo", 1, "foo: unknown field; known are apiVersion, kind, metadata"),
    ("metadata.label", {}, "did you mean 'labels'?"),
    ("metadata.labels.a", 1, 'put it into quotes: "1"'),
    ("metadata.labels", ["a"], "an object must be"),
    ("spec", None, "spec: is missing"),
    ("spec.pytorchReplicaSpecs", None, "spec.pytorchReplicaSpecs: is missing"),
    ("spec.pytorchReplicaSpecs", [], "an object must be"),
    ("spec.nprocPerNode", 4, 'put it into quotes: "4"'),
    ("spec.elasticPolicy.rdzvConf", {"a": "b"}, "begin each item with `- "),
    (f"{WORKER}.replicas", "4", "write 4 without quotes"),
    (f"{WORKER}.replicas", 2.5, "a whole number must be"),
    (f"{WORKER}.replicas", 2**31, "does not fit into int32"),
    (f"{WORKER}.replicas", True, "a whole number must be"),
    (f"{WORKER}.template", "x", "its fields are metadata, spec"),
    (f"{WORKER}.template.metadata.creation", None, "unknown field"),
    (f"{POD}.containers", None, "containers: is missing"),
    (f"{POD}.containers", {"name": "pytorch"}, "begin each item with `- name: `"),
    (f"{POD}.containers", [{"image": "x"}], "containers[0].name: is missing"),
    (f"{POD}.containers", [None], "null stands where an object must be"),
    (f"{POD}.containers", 2 * [{"name": "pytorch", "image": "x"}], "has the name pytorch of"),
    (f"{POD}.hostNetwork", "true", "write true without quotes"),
    (f"{POD}.terminationGracePeriodSeconds", "60", "write 60 without quotes"),
    (f"{POD}.tolerations", [{"key": "a", "effects": "NoSchedule"}], "did you mean 'effect'?"),
    (f"{POD}.nodeSelector", {"a": True}, "put it into quotes"),
    (f"{CONTAINER}.command", "python train.py", 'write ["python", "train.py"]'),
    (f"{CONTAINER}.args", ["--steps", 100], 'args[1]: 100, a number, stands where'),
    (f"{CONTAINER}.env", [{"name": "A", "value": 1}], 'put it into quotes: "1"'),
    (f"{CONTAINER}.env", [{"name": "A"}, {"name": "A"}], "has the name A of"),
    (f"{CONTAINER}.env", {"A": "1"}, "begin each item with `- name: `"),
    (f"{CONTAINER}.ports", [{"name": "a", "containerPort": "80"}], "write 80 without quotes"),
    (f"{CONTAINER}.ports", 2 * [{"containerPort": 80}], "has the containerPort 80, protocol TCP"),
    (f"{CONTAINER}.resources.limits.cpu", 0.5, 'put it into quotes: "0.5"'),
    (f"{CONTAINER}.resources.limits.cpu", 2**64, 'put it into quotes: "18446744073709551616"'),
    (f"{CONTAINER}.resources.limits.cpu", "2 cores", "is no quantity; use one such as 500m"),
    (f"{CONTAINER}.resources.limits.memory", "4GB", "is no quantity"),
    (f"{CONTAINER}.resources.limit", {}, "did you mean 'limits'?"),
    (f"{CONTAINER}.livenessProbe.exec.command", "true", 'write ["true"]'),
]  # fmt: skip
# What looks odd, and is allowed: nobody may be kept from it.
ALLOWED = [
    ("spec.runPolicy.backoffLimit", 4.0),
    ("metadata.creationTimestamp", "2026-01-31T12:00:00Z"),
    ("metadata.annotations", None),
    ("spec.runPolicy.schedulingPolicy", None),
    (f"{WORKER}.template.metadata.labels", None),
    (f"{POD}.nodeSelector", {}),
    (f"{POD}.nodeSelector", {"a": None}),
    (f"{POD}.restartPolicy", "Never"),
    (f"{POD}.securityContext", None),
    (f"{POD}.affinity", {}),
    (f"{CONTAINER}.resources.limits.cpu", "1e3"),
    (f"{CONTAINER}.resources.limits.memory", 2**33),
    (f"{CONTAINER}.ports", [{"containerPort": 53, "protocol": it} for it in ("TCP", "UDP")]),
    (f"{CONTAINER}.env", []),
    ("status", {"conditions": []}),
]  # fmt: skip

FIELDS = [
    "metadata.name", "metadata.namespace", "metadata.uid", "metadata.labels['a.b/c']",
    "metadata.annotations['a']", "spec.nodeName", "spec.serviceAccountName", "status.hostIP",
    "status.hostIPs", "status.podIP", "status.podIPs",
]  # fmt: skip
SPREAD = {"maxSkew": 1, "topologyKey": "zone"}


def node_affinity(expression):
    """An affinity with one expression about nodes."""
    terms = [{"matchExpressions": [{"key": "zone", "values": ["a"], **expression}]}]
    required = {"nodeSelectorTerms": terms}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def field_ref(path):
    """A variable with the value of a pod's field."""
    return {"name": re.sub(r"\W", "_", path), "valueFrom": {"fieldRef": {"fieldPath": path}}}


# What the API takes in a PyTorchJob, and refuses in each of its pods.
PODS_REFUSED = [
    (
        f"{POD}.initContainers",
        [{"name": "Py_torch", "image": "x"}],
        "'Py_torch' is not the name of a container",
    ),
    (f"{POD}.initContainers", [{"name": "pytorch", "image": "x"}], "'pytorch' is that of"),
    (f"{POD}.volumes.0.name", "Data", "'Data' is not the name of a volume"),
    (f"{POD}.volumes.0.emptyDir", {}, "has persistentVolumeClaim and emptyDir"),
    (f"{CONTAINER}.volumeMounts.0.name", "date", "there is no volume 'date'"),
    (f"{CONTAINER}.ports.0.name", "pytorchjob-port-1", "is not the name of a port"),
    (f"{CONTAINER}.ports.0.containerPort", 70000, "70000 is no port"),
    (f"{CONTAINER}.ports.0.protocol", "http", "'http' is unknown; use TCP or UDP or SCTP"),
    (f"{CONTAINER}.resources.limits.cpu", "500m", "1, but the limit is 500m"),
    (f"{CONTAINER}.resources.requests.memory", "9Ti", "9Ti, but the limit is 3Gi"),
    (f"{CONTAINER}.resources.requests.memory", "-1", "-1 is negative"),
    (f"{CONTAINER}.resources.limits.gpu", "1", "'gpu' is no resource"),
    (f"{CONTAINER}.resources.requests.nvidia~com/gpu", "1", "1, but there is no limit"),
    (f"{CONTAINER}.resources.limits.nvidia~com/gpu", "0.5", "not a whole number of devices"),
    (f"{CONTAINER}.env", [{"name": "A=B", "value": "1"}], "'A=B' is not the name of a variable"),
    (f"{CONTAINER}.env.0.value", "x", "has value and valueFrom"),
    (f"{CONTAINER}.env.0.valueFrom", {}, "names no source, or several"),
    (f"{WORKER}.template.metadata.labels.team", "a b", "'a b' is not a value"),
    (f"{WORKER}.template.metadata.labels.a b", "c", "'a b' is not a key"),
    (f"{POD}.nodeSelector", {"zone": "a/b"}, "'a/b' is not a value"),
    (f"{POD}.dnsPolicy", "default", "'default' is unknown; use ClusterFirst or"),
    (f"{POD}.tolerations.0.effect", "Never", "'Never' is unknown; use NoSchedule or"),
    (f"{POD}.tolerations.0.value", "x", "no meaning with the operator Exists"),
    (f"{CONTAINER}.imagePullPolicy", "always", "use Always or IfNotPresent or Never"),
    (f"{POD}.affinity", node_affinity({"operator": "in"}), "'in' is unknown; use In or NotIn"),
    (f"{POD}.topologySpreadConstraints", [{**SPREAD, "whenUnsatisfiable": "Never"}], "use DoNot"),
    (f"{POD}.volumes.0", {"name": "data", "hostPath": {"path": "/x", "type": "dir"}}, "use Direc"),
    (f"{POD}.securityContext.seccompProfile.type", "runtime/default", "use RuntimeDefault or"),
    (f"{POD}.serviceAccountName", "Team_A", "'Team_A' is not the name of an object"),
    (f"{POD}.tolerations.0", {"key": "a", "tolerationSeconds": 5}, "is for the effect NoExecute"),
    (f"{CONTAINER}.terminationMessagePolicy", "Logs", "use File or FallbackToLogsOnError"),
    (f"{CONTAINER}.envFrom", [{"secretRef": {"name": "HF_token"}}], "is not the name of an"),
    (f"{CONTAINER}.env", [field_ref("metadata.podName")], "use one such as metadata.name"),
    (f"{CONTAINER}.env", [field_ref("metadata.labels.team")], "use one such as metadata.name"),
    (f"{CONTAINER}.readinessProbe", {"periodSeconds": 5}, "readinessProbe: does nothing, or sev"),
    (f"{CONTAINER}.lifecycle", {"preStop": {}}, "use one of exec, httpGet, tcpSocket"),
    (f"{CONTAINER}.securityContext.privileged", True, "is false, and privileged is true"),
    (f"{CONTAINER}.volumeMounts.0.subPath", "/a", "leads out of the volume"),
    (f"{CONTAINER}.volumeMounts.0.subPath", "a/../b", "leads out of the volume"),
]
PODS_ALLOWED = [
    (f"{POD}.volumes.0", {"name": "data"}),
    (f"{CONTAINER}.volumeMounts.0.mountPath", "a:b"),
    (f"{CONTAINER}.env", [{"name": "a.b-c", "value": ""}]),
    (f"{CONTAINER}.env", [{"name": "A", "value": "", "valueFrom": None}]),
    (f"{CONTAINER}.resources.limits.nvidia~com/gpu", 1),
    (f"{CONTAINER}.resources.requests", {"cpu": "100m"}),
    (f"{CONTAINER}.resources", {}),
    (f"{POD}.initContainers", [{"name": "wait", "image": "x:1@sha256:" + 64 * "0"}]),
    (f"{WORKER}.template.metadata.annotations.x", "any text: at all"),
    (f"{POD}.tolerations", [{"operator": "Exists"}]),
    (f"{POD}.nodeSelector", {"zone": ""}),
    (f"{POD}.affinity", node_affinity({"operator": "Gt", "values": ["1"]})),
    (f"{POD}.topologySpreadConstraints", [{**SPREAD, "whenUnsatisfiable": "DoNotSchedule"}]),
    (f"{POD}.volumes.0", {"name": "data", "hostPath": {"path": "/x", "type": ""}}),
    (f"{POD}.tolerations", [{"effect": "NoExecute", "operator": "Exists", "tolerationSeconds": 5}]),
    (f"{CONTAINER}.env", [field_ref(it) for it in FIELDS]),
    (f"{CONTAINER}.envFrom", [{"secretRef": {"name": "hf.token", "optional": True}}]),
    (f"{CONTAINER}.lifecycle", {"preStop": {"sleep": {"seconds": 3}}}),
    (f"{CONTAINER}.readinessProbe", {"tcpSocket": {"port": 80}, "exec": None}),
    (f"{CONTAINER}.volumeMounts.0.subPath", "a..b/c"),
]


def with_field(path, value):
    """A rendered job with one field changed; None leaves the field without a value, ~ is a dot."""
    job = copy.deepcopy(render_job({"replicas": 4, "name": "odd"}))
    *parents, last = path.split(".")
    place = job
    for key in parents:
        place = place[int(key) if key.isdigit() else key]
    if isinstance(value, dict | list):
        value = copy.deepcopy(value)
    place[int(last) if last.isdigit() else last.replace("~", ".")] = value
    return job
