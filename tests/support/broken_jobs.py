"""Real jobs that do not run, for the causes that a test can produce on a cluster.

A case has the job, the cause, words of its sentence (object and field), and a word that the command
of that sentence prints, if it prints any.
"""

from typing import Any, NamedTuple

from support.small_jobs import SLEEP, job

GREED = "x = []\nwhile True: x.append(bytearray(10**7))"
DISK = "import time; open('/scratch/x', 'wb').write(bytes(30 * 2**20)); time.sleep(600)"
QUIET = "import time; print('waiting for pods: 1 are here'); time.sleep(600)"
ALONE = """
import time
for step in range(9999):
    print(f"step {step}/9999  loss 1.0000  lr 1.00e-03  1.0 k tok/s  1 rank", flush=True)
    time.sleep(0.5)
"""
DEVICE = "gptddp.example/none"  # a resource that no node has

SECRET = {"name": "A", "valueFrom": {"secretKeyRef": {"name": "nothing", "key": "k"}}}
FAILING = {"exec": {"command": ["false"]}, "periodSeconds": 1}


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


def ours(made: dict[str, Any], **labels: str) -> dict[str, Any]:
    """The job with the labels of a job of gptddp-k8s, which may suspend and resume it."""
    own = {"instance": made["metadata"]["name"], "managed-by": "gptddp-k8s"}
    named = {f"app.kubernetes.io/{key}": value for key, value in own.items()}
    made["metadata"]["labels"].update(named | labels)
    return made


def requests(**resources: str) -> dict[str, Any]:
    return {"requests": {"cpu": "10m", **resources}, "limits": {"memory": "64Mi"}}


def device(name: str) -> dict[str, Any]:
    return {"requests": {"cpu": "10m", name: "1"}, "limits": {"memory": "64Mi", name: "1"}}


# Objects that the cases need in their namespace. The quota is of a resource of no other pod.
NEEDED = [
    {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small"},
        "spec": {"hard": {f"requests.{DEVICE}": "0"}},
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

CASES = [
    Case(job("security", SLEEP, securityContext={}), "pod-security",
         ("Pod Security refuses its pods: violates PodSecurity", "securityContext"),
         "enforce=restricted"),
    Case(job("quota", SLEEP, resources=device(DEVICE)), "quota", ("quota: small", DEVICE), DEVICE),
    Case(job("account", SLEEP, pod={"serviceAccountName": "nobody"}), "refused",
         ("its pods are refused", 'serviceaccount "nobody" not found'), "FailedCreatePod"),
    Case(job("x" * 58, SLEEP), "refused", ("its services are refused", "63 characters"),
         "FailedCreateService"),
    Case(with_policy(job("elsewhere", SLEEP), managedBy="kueue.x-k8s.io/multikueue"),
         "no-operator", ("spec.runPolicy.managedBy",), "training-operator"),
    Case(ours(job("held", SLEEP, suspend=True)), "suspended", ("spec.runPolicy.suspend",)),
    Case(ours(job("unqueued", SLEEP, suspend=True), **{"kueue.x-k8s.io/queue-name": "team"}),
         "no-kueue", ("queue team", "has no Kueue")),
    Case(job("rank", "print('gptddp.launch: rank 3: no data'); raise SystemExit(2)"), "failed",
         ("exited with 2 (bad configuration or data): rank 3: no data",), "rank 3: no data"),
    Case(job("room", SLEEP, resources=requests(cpu="500")), "no-room",
         ("Insufficient cpu", "resources.requests[cpu]: 500"), "Allocatable"),
    Case(job("selector", SLEEP, pod={"nodeSelector": {"disk": "ssd"}}), "taints",
         ("spec.nodeSelector: disk=ssd", "spec.tolerations: none"), "kubernetes.io/hostname"),
    Case(job("gate", SLEEP, pod={"schedulingGates": [{"name": "example.com/gate"}]}), "pod",
         ("SchedulingGated: ",), "gate-worker-0"),
    Case(job("scheduler", SLEEP, pod={"schedulerName": "none-such"}), "starting",
         ("waits for its scheduler none-such (spec.schedulerName)",)),
    Case(mounted("claim", **MISSING), "claim-missing", ("PersistentVolumeClaim nothing",),
         "unbound"),
    Case(mounted("unbound", **UNBOUND), "claim-unbound",
         ("unbound has no volume: storageclass", "gptddp-none"), "gptddp-none"),
    Case(job("name", SLEEP, image="Nowhere/UP:1"), "image",
         ("Nowhere/UP:1", "InvalidImageName"), "Nowhere/UP:1"),
    Case(job("registry", SLEEP, image="none.invalid/gptddp:1"), "image",
         ("cannot get the image none.invalid/gptddp:1: ",), "none.invalid"),
    Case(job("secret", SLEEP, env=[SECRET]), "config", ('secret "nothing" not found',), "there"),
    Case(mounted("map", configMap={"name": "nothing"}), "pod",
         ("FailedMount: ", 'configmap "nothing" not found'), "FailedMount"),
    Case(job("probe", SLEEP, readinessProbe=FAILING), "pod", ("Readiness probe failed",),
         "Readiness probe failed"),
    Case(job("command", SLEEP, policy="OnFailure", command=["pythn"]), "crash",
         ("128 (the container could not be started)", '"pythn": executable file not found')),
    Case(job("greed", GREED, policy="OnFailure"), "out-of-memory",
         ("its memory of 64Mi", "resources.limits.memory"), "64Mi"),
    Case(job("error", "raise ValueError('no luck')", policy="OnFailure"), "crash",
         ("exited with 1 (an error)", "ValueError: no luck"), "ValueError: no luck"),
    Case(job("fault", "raise SystemExit(139)"), "replaced",
         ("exited with 139 (SIGSEGV)", "it was replaced"), "Started"),
    Case(beside("sidecar", "print('done')", init=False), "sidecar",
         ("container pytorch has ended with 0", "other keeps"), "still here"),
    Case(beside("beside", "pass", init=False, code="raise SystemExit('no token')"),
         "failed-container", ("container other exited with 1", "no token"), "no token"),
    Case(beside("init", SLEEP, init=True), "init", ("init container other",), "still here"),
    Case(mounted("disk", DISK, emptyDir={"sizeLimit": "1Mi"}), "evicted or replaced",
         ("Evicted: ", "exceeds the limit")),
    Case(job("quiet", QUIET), "no-step",
         ("not one step was logged", "waiting for pods: 1 are here"), "waiting for pods"),
    Case(job("alone", ALONE, replicas=2), "left-out", ("each step is done by 1 of 2 ranks",),
         "1 rank"),
]  # fmt: skip
