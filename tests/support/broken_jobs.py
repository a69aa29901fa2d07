"""Jobs that do not run, one for each cause that a cluster can be brought to: the real thing.

A case: the job's name, the job, the cause, words of the sentence (object and field), and a word of
what the command of that sentence prints; none where it mends.
"""

from typing import Any, NamedTuple

from support.small_jobs import RESTRICTED, SLEEP, job

from gptddp import __version__

GREED = "x = []\nwhile True: x.append(bytearray(10**7))"
WRITE = "open('/opt/gptddp/x', 'w')"
DISK = "import time; open('/scratch/x', 'wb').write(bytes(30 * 2**20)); time.sleep(600)"
QUIET = "import time; print('waiting for pods: 1 are here'); time.sleep(600)"
DEVICE = "gptddp.example/none"  # a resource that no node has

SECRET = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "nothing", "key": "k"}}}
KEY = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "there", "key": "token"}}}
FAILING = {"exec": {"command": ["false"]}, "periodSeconds": 1}
NEAR_NOBODY = {
    "requiredDuringSchedulingIgnoredDuringExecution": [
        {
            "labelSelector": {"matchLabels": {"app": "nobody"}},
            "topologyKey": "kubernetes.io/hostname",
        }
    ]
}


class Case(NamedTuple):
    """One broken job."""

    job: dict[str, Any]
    cause: str
    words: tuple[str, ...]
    shown: str = ""

    @property
    def name(self) -> str:
        return str(self.job["metadata"]["name"])


def mounted(name: str, code: str = SLEEP, **source: Any) -> dict[str, Any]:
    """A job with a volume of this source at /scratch."""
    return job(
        name,
        code,
        pod={"volumes": [{"name": "d", **source}]},
        volumeMounts=[{"name": "d", "mountPath": "/scratch"}],
    )


def beside(name: str, main: str, *, init: bool, code: str = "") -> dict[str, Any]:
    """A job whose pod has a second container, which sleeps: beside the training, or before it."""
    made = job(name, main)
    spec = made["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    other = {**spec["containers"][0], "name": "other", "command": ["python", "-uc", code or TALKS]}
    if init:
        spec["initContainers"] = [other]
    else:
        spec["containers"].append(other)
    return made


TALKS = "import time; print('still here'); time.sleep(600)"


def with_policy(made: dict[str, Any], **run_policy: Any) -> dict[str, Any]:
    made["spec"]["runPolicy"].update(run_policy)
    return made


def requests(**resources: str) -> dict[str, Any]:
    return {"requests": {"cpu": "10m", **resources}, "limits": {"memory": "64Mi"}}


def device(name: str) -> dict[str, Any]:
    return {"requests": {"cpu": "10m", name: "1"}, "limits": {"memory": "64Mi", name: "1"}}


# What the cases need in their namespace. The quota is of a resource that other pods do not ask for.
NEEDED = [
    {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small"},
        "spec": {"hard": {f"requests.{DEVICE}": "0"}},
    },
    {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "least"},
        "spec": {"limits": [{"type": "Container", "min": {"memory": "8Mi"}}]},
    },
    {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "unbound"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "gptddp-none",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    },
    {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "there"}, "stringData": {"a": "b"}},
]
UNBOUND = {"persistentVolumeClaim": {"claimName": "unbound"}}
MISSING = {"persistentVolumeClaim": {"claimName": "nothing"}}
NO_DRIVER = {"csi": {"driver": "none.example"}}

CASES = [
    Case(job("security", SLEEP, securityContext={}), "pod-security",
         ("Pod Security (restricted", "securityContext"), "enforce=restricted"),
    Case(job("quota", SLEEP, resources=device(DEVICE)), "quota",
         ("quota: small", DEVICE), DEVICE),
    Case(job("range", SLEEP, resources={"limits": {"memory": "4Mi"}}), "limit-range",
         ("LimitRange", "minimum memory usage per Container is 8Mi"), "8Mi"),
    Case(job("account", SLEEP, pod={"serviceAccountName": "nobody"}), "service-account-missing",
         ("no ServiceAccount nobody", "spec.serviceAccountName")),
    Case(job("priority", SLEEP, pod={"priorityClassName": "none-such"}), "priority-class-missing",
         ("no PriorityClass none-such", "spec.priorityClassName"), "system-node-critical"),
    Case(job("runtime", SLEEP, pod={"runtimeClassName": "none-such"}), "runtime-class-missing",
         ("no RuntimeClass none-such", "spec.runtimeClassName")),
    Case(job("invalid", SLEEP, volumeMounts=[{"name": "nope", "mountPath": "/x"}]), "pod-invalid",
         ("spec.containers[0].volumeMounts[0].name", "nope"), "nope"),
    Case(job("x" * 58, SLEEP), "service-refused", ("63 characters",), "FailedCreateService"),
    Case(with_policy(job("elsewhere", SLEEP), managedBy="kueue.x-k8s.io/multikueue"),
         "managed-elsewhere", ("spec.runPolicy.managedBy",), "multikueue"),
    Case(job("held", SLEEP, suspend=True), "suspended", ("spec.runPolicy.suspend",)),
    Case(job("rank", "print('gptddp.launch: rank 3: no data'); raise SystemExit(2)"), "failed",
         ("exited with 2 (bad configuration or data): rank 3: no data",), "rank 3: no data"),
    Case(job("room", SLEEP, resources=requests(cpu="500")), "no-room",
         ("Insufficient cpu", "resources.requests[cpu]: pytorch requests 500"), "Allocatable"),
    Case(job("selector", SLEEP, pod={"nodeSelector": {"disk": "ssd"}}), "node-selector",
         ("spec.nodeSelector: disk=ssd", "spec.tolerations: none"), "kubernetes.io/hostname"),
    Case(job("affinity", SLEEP, pod={"affinity": {"podAffinity": NEAR_NOBODY}}), "pod-affinity",
         ("affinity rules", "spec.affinity"), "room-worker-0"),
    Case(job("gate", SLEEP, pod={"schedulingGates": [{"name": "example.com/gate"}]}), "gated",
         ("spec.schedulingGates",), "example.com/gate"),
    Case(job("scheduler", SLEEP, pod={"schedulerName": "none-such"}), "no-scheduler",
         ("spec.schedulerName is none-such",), "none-such"),
    Case(mounted("claim", **MISSING), "claim-missing", ("PersistentVolumeClaim nothing",),
         "unbound"),
    Case(mounted("unbound", **UNBOUND), "claim-unbound",
         ("PersistentVolumeClaim", "unbound"), "gptddp-none"),
    Case(job("name", SLEEP, image="Nowhere/UP:1"), "image-name",
         ("Nowhere/UP:1", "spec.containers[].image"), "Nowhere/UP:1"),
    Case(job("never", SLEEP, image="gptddp:none", imagePullPolicy="Never"), "image-never",
         ("gptddp:none", "imagePullPolicy"), f"gptddp:{__version__}"),
    Case(job("registry", SLEEP, image="none.invalid/gptddp:1"), "image-unreachable",
         ("none.invalid/gptddp:1",), "none.invalid"),
    Case(job("secret", SLEEP, env=[SECRET]), "secret-missing", ('secret "nothing"',), "there"),
    Case(mounted("map", configMap={"name": "nothing"}), "configmap-missing",
         ('configmap "nothing"', "spec.volumes"), "kube-root-ca.crt"),
    Case(job("key", SLEEP, env=[KEY]), "key-missing", ("key token in Secret", "there"), "a:"),
    Case(job("command", SLEEP, policy="OnFailure", command=["pythn"]), "command",
         ('"pythn": executable file not found', "spec.containers[].command"), "pythn"),
    Case(job("greed", GREED, policy="OnFailure"), "out-of-memory",
         ("its memory of 64Mi", "resources.limits.memory"), "64Mi"),
    Case(job("frozen", WRITE, policy="OnFailure",
             securityContext={**RESTRICTED, "readOnlyRootFilesystem": True}),
         "read-only", ("Read-only file system: '/opt/gptddp/x'",), "readOnlyRootFilesystem"),
    Case(job("rights", WRITE, policy="OnFailure"), "permission",
         ("Permission denied: '/opt/gptddp/x'", "securityContext.fsGroup"), "runAsNonRoot"),
    Case(job("error", "raise ValueError('no luck')", policy="OnFailure"), "crash-loop",
         ("ValueError: no luck",), "ValueError: no luck"),
    Case(job("probe", SLEEP, readinessProbe=FAILING), "probe",
         ("spec.containers[].readinessProbe",), "Readiness probe failed"),
    Case(beside("sidecar", "print('done')", init=False), "sidecar",
         ("container pytorch has ended with 0", "other keeps"), "still here"),
    Case(beside("beside", "pass", init=False, code="raise SystemExit('no token')"),
         "failed-container", ("container other exited with 1", "no token"), "no token"),
    Case(job("ready", SLEEP, pod={"readinessGates": [{"conditionType": "example.com/up"}]}),
         "readiness-gate", ("spec.readinessGates", "example.com/up"), "example.com/up"),
    Case(beside("init", SLEEP, init=True), "init", ("init container other",), "still here"),
    Case(mounted("driver", **NO_DRIVER), "volume", ("spec.volumes", "none.example"),
         "none.example"),
    Case(mounted("disk", DISK, emptyDir={"sizeLimit": "1Mi"}), "evicted-storage",
         ("exceeds the limit", "sizeLimit"), "Evicted"),
    Case(job("quiet", QUIET), "no-step",
         ("not one step was logged", "waiting for pods: 1 are here"), "waiting for pods"),
]  # fmt: skip
