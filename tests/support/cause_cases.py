"""What a cluster says of jobs that do not run, and the cause that it is."""

from datetime import UTC, datetime, timedelta

from support.api_objects import at, condition, event, job, pod, terminated, unscheduled, waiting

from gptddp.k8s.objects import seconds
from gptddp.k8s.observe import job_causes
from gptddp.k8s.observe.facts import Facts

NOW = seconds(at(0, minute=1))
NODES = "0/3 nodes are available: "
HELD = "ContainerCreating"


def refused(message):
    made = job()
    told = 'Error creating: pods "demo-worker-0" is forbidden: '
    return Facts(made, [], [event(made, "FailedCreatePod", told + message)], NOW)


def placed(message, **spec):
    made = unscheduled(0, NODES + message)
    made["spec"] |= spec
    return Facts(job("Created"), [made], (), NOW)


def gated():
    made = unscheduled(0, "Scheduling is blocked")
    made["status"]["conditions"][0]["reason"] = "SchedulingGated"
    return Facts(job("Created"), [made], (), NOW)


def held(reason, message="", *events, second=5):
    """A container that waits; with events about its pod, (reason, message) each."""
    made = pod(0, waiting(reason, message), phase="Pending")
    return Facts(job("Created"), [made], [event(made, *it, second=second) for it in events], NOW)


def ended(code, message="", reason="Error"):
    return Facts(job("Running"), [pod(0, terminated(code, message, reason))], (), NOW)


def key_of_a_mount(kind, source):
    """A volume of a Secret or ConfigMap that lacks a key which the volume names."""
    said = f'MountVolume.SetUp failed for volume "d" : references non-existent {kind} key: token'
    facts = held(HELD, "", ("FailedMount", said))
    facts.pods[0]["spec"]["volumes"] = [{"name": "e"}, {"name": "d", **source}]
    return facts


def by_node(reason, message):
    made = pod(0, {"waiting": {}}, phase="Failed", reason=reason, message=message)
    made["status"]["containerStatuses"] = []
    return Facts(job("Restarting"), [made], (), NOW)


def disrupted(reason):
    said = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "m"}
    leaving = {"deletionTimestamp": at(59)}
    return Facts(job("Running"), [pod(0, conditions=[said], metadata=leaving)], (), NOW)


def lost(*told, code=137):
    """Pod 0 was replaced ten seconds ago, and its predecessor left these events."""
    made, new = job("Running", replicas=1), pod(0)
    exited = event(made, "ExitedWithCode", f"Pod: ns.demo-worker-0 exited with code {code}", 50)
    created = event(made, "SuccessfulCreatePod", "Created pod: demo-worker-0", 51)
    created["count"] = 2
    old = pod(0, uid="old")
    return Facts(made, [new], [exited, created, *(event(old, *it, 49) for it in told)], NOW)


def out_of_memory_before():
    """The pod is gone; its limit is in the job."""
    facts = lost()
    words = "Error pod demo-worker-0 container pytorch exitCode: 137 terminated message: "
    limited = {"name": "pytorch", "resources": {"limits": {"memory": "7Gi"}}}
    template = {"spec": {"containers": [limited]}}
    facts.job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"] = template
    killed = event(facts.job, "OOMKilled", words, 50)
    return Facts(facts.job, facts.pods, [*facts.events, killed], NOW)


def made_again(count):
    events = [
        event(pod(0, uid=f"u{n}"), "OutOfcpu", "Node didn't have enough resource: cpu", n)
        for n in range(count)
    ]
    return Facts(job("Restarting", replicas=1), [], events, NOW)


def unbound():
    volume = {"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}
    return placed("pod has unbound immediate PersistentVolumeClaims.", volumes=[volume])


def with_sidecar():
    made = pod(0, terminated(0, reason="Completed"))
    other = {"name": "istio-proxy", "ready": True, "state": {"running": {}}}
    made["status"]["containerStatuses"].append(other)
    return Facts(job("Running", replicas=1), [made], (), NOW)


def other_crashed():
    made = pod(0)
    other = {"name": "istio-proxy", "ready": False, "state": terminated(1, "no token")}
    made["status"]["containerStatuses"].append(other)
    return Facts(job("Running", replicas=1), [made], (), NOW)


def unready(ready=False):
    made = pod(0, ready=ready)
    told = event(made, "Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 5")
    return Facts(job("Running", replicas=1), [made], [told], NOW)


def init():
    made = pod(0, waiting("PodInitializing"), phase="Pending")
    state = {"name": "init-pytorch", "ready": False, "state": {"running": {}}}
    made["status"]["initContainerStatuses"] = [state]
    return Facts(job("Created", replicas=1), [made], (), NOW)


def init_without_image():
    facts = init()
    waits = waiting("ErrImagePull", "manifest not found")
    facts.pods[0]["status"]["initContainerStatuses"][0] |= {"state": waits, "image": "alpine:3.10"}
    return facts


def init_failed():
    facts = init()
    facts.pods[0]["status"]["initContainerStatuses"][0]["state"] = terminated(3, "no such host")
    return facts


def taken_before():
    """It waits for room since a pod of a higher priority has taken its predecessor's."""
    facts = placed("3 Insufficient cpu.", **ASKS)
    took = event(pod(0, uid="old"), "Preempted", "Preempted by pod u7 on node n1", 50)
    return Facts(facts.job, facts.pods, [took], NOW)


def quiet(last_step_s, now_s=700, lines=("waiting for pods: 1 are here",), label="gptddp"):
    """One pod that runs since second 1; its log has a step, and then these lines."""
    start = datetime.fromtimestamp(seconds(at(0)), UTC)
    steps = [] if last_step_s is None else [(start + timedelta(seconds=last_step_s), STEP)]
    log = [*steps, *((start + timedelta(seconds=9), line) for line in lines)]
    made = job("Running", replicas=1, labels={"app.kubernetes.io/name": label})
    return Facts(made, [pod(0)], (), start.timestamp() + now_s, log=log)


STEP = "step 40/400  loss 3.2144  lr 1.00e-03  45.2k tok/s  4 ranks  1:23 left"
NO_SERVICE = event(job(), "FailedCreateService", "Error creating: 63 characters")
TAINTED = "node(s) had untolerated taint {nvidia.com/gpu: }."
NOT_MATCHED = "node(s) didn't match Pod's node affinity/selector."
TAINT = "1 node(s) had untolerated taint {node-role.kubernetes.io/control-plane: }, "
GIVEN_UP = job(condition("Failed"), annotations={job_causes.GIVEN_UP: "made 12 times: OutOfcpu"})
GONE = job("Running", deletionTimestamp=at(50))
ELSEWHERE = job()
ELSEWHERE["spec"]["runPolicy"]["managedBy"] = "kueue.x-k8s.io/multikueue"
NOT_LOOKED_AT = pod(0, phase="Pending")
NOT_LOOKED_AT["spec"] = {"schedulerName": "volcano", "containers": []}
NOT_LOOKED_AT["status"] = {"phase": "Pending"}
NOMINATED = unscheduled(0, NODES + "3 Insufficient cpu.")
NOMINATED["status"]["nominatedNodeName"] = "node7"
ASKS = {"containers": [{"name": "pytorch", "resources": {"requests": {"cpu": "64"}}}]}
GPU = {"containers": [{"name": "pytorch", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}
VOLUMES = {"volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "runs"}}]}
NO_IP = "Failed to create pod sandbox: plugin failed: no IP addresses available in range set: 10/24"
PULL = ("Pulling", 'Pulling image "team/big:1"')
KEY = "couldn't find key token in Secret team/hub"
START = 'exec: "pythn": executable file not found in $PATH: unknown'
STORAGE = "Pod ephemeral local storage usage exceeds the total limit of containers 10Mi. "
SHUT = "Pod was terminated in response to imminent node shutdown."
MULTI = 'Multi-Attach error for volume "pv" Volume is already used by pod(s) x'

# The cause, what is there, words of the sentence.
CASES = [
    ("pod-security", refused('violates PodSecurity "restricted:v1": x'), "restricted:v1"),
    ("quota", refused("exceeded quota: small, requested: pods=1"), "quota: small, requested"),
    ("quota-unstated", refused("failed quota: small: must specify limits.cpu for: pytorch"),
     "small wants its pods to state limits.cpu"),
    ("limit-range", refused("maximum cpu usage per Container is 1, but limit is 2"), "LimitRange"),
    ("service-account-missing", refused('serviceaccount "me" not found'), "no ServiceAccount me"),
    ("priority-class-missing", refused("no PriorityClass with name high was found"),
     "spec.priorityClassName"),
    ("runtime-class-missing", refused('pod rejected: RuntimeClass "gpu" not found'),
     "no RuntimeClass gpu"),
    ("webhook", refused('admission webhook "a.b" denied the request: no'), '"a.b" denied'),
    ("policy", refused("ValidatingAdmissionPolicy 'p' with binding 'b' denied request: no"),
     "'p' with"),
    ("pod-invalid", refused('Pod "a" is invalid: spec.containers[0].name: x'),
     "spec.containers[0].name"),
    ("namespace-ending", refused("unable to create new content because it is being terminated"),
     "namespace is being deleted"),
    ("pods-refused", refused("something else"), "refused: pods"),
    (
        "service-refused",
        Facts(job("Created"), [pod(n) for n in range(4)], [NO_SERVICE], NOW),
        "63 characters",
    ),
    ("no-operator", Facts(job(), [], (), NOW), "no training operator"),
    ("managed-elsewhere", Facts(ELSEWHERE, [], (), NOW), "spec.runPolicy.managedBy"),
    ("suspended", Facts(job(suspend=True), [], (), NOW), "spec.runPolicy.suspend"),
    ("deleting", Facts(GONE, [pod(0)], (), NOW), "1 pods are still stopping"),
    ("failed", Facts(job("Failed"), [pod(0, terminated(2))], (), NOW), "bad configuration"),
    ("limit", Facts(job(condition("Failed", message="it reached the backoff limit")), [], (), NOW),
     "spec.runPolicy"),
    ("given-up", Facts(GIVEN_UP, [], (), NOW), "made 12 times: OutOfcpu"),
    ("in-vain", made_again(5), "made 5 times in 60 s, and never started: OutOfcpu: Node didn't"),
    ("replaced", lost(code=139), "139 (SIGSEGV); it was replaced"),
    ("no-step", quiet(None),
     "1 of 1 pods run, and not one step was logged for 699 s; the log's last line: waiting for"),
    ("starting", Facts(job("Created"), [], (), NOW), "not been created yet"),
    ("no-room", placed(f"{TAINT}2 Insufficient cpu.", **ASKS),
     "resources.requests[cpu]: pytorch requests 64"),
    ("too-many-pods", placed("3 Too many pods."), "Too many pods"),
    (
        "taints",
        placed(f"1 Insufficient nvidia.com/gpu, 2 {TAINTED}", tolerations=[{"key": "a"}], **GPU),
        "spec.tolerations: a",
    ),
    (
        "node-selector",
        placed(f"{TAINT}2 {NOT_MATCHED}", nodeSelector={"disk": "ssd"}),
        "spec.nodeSelector: disk=ssd",
    ),
    ("taints", placed(f"1 {NOT_MATCHED[:-1]}, 2 {TAINTED}"), "spec.tolerations: none"),
    ("no-room", placed(f"1 Insufficient cpu, 2 {TAINTED}", **ASKS), "pytorch requests 64"),
    ("pod-affinity", placed("3 node(s) didn't match pod anti-affinity rules."), "spec.affinity"),
    ("cordoned", placed(f"{TAINT}2 node(s) were unschedulable."), "unschedulable"),
    ("nodes-not-ready", placed("2 node(s) had untolerated taint {node.kubernetes.io/not-ready: }."),
     "not-ready"),
    ("host-port", placed("3 node(s) didn't have free ports for the requested pod ports."),
     "hostPort"),
    ("preempting", Facts(job("Created"), [NOMINATED], (), NOW), "waits on node node7"),
    ("gated", gated(), "spec.schedulingGates"),
    ("no-scheduler", Facts(job("Created"), [NOT_LOOKED_AT], (), NOW),
     "spec.schedulerName is volcano"),
    ("unschedulable", placed("3 of a reason that is new."), "a reason that is new"),
    ("image-name", held("InvalidImageName", "invalid reference format"),
     "mend spec.containers[].image"),
    ("image-never", held("ErrImageNeverPull"), "imagePullPolicy is Never"),
    ("image-denied", held("ErrImagePull", "401 Unauthorized"), "spec.imagePullSecrets"),
    ("image-platform", held("ErrImagePull", "no match for platform in manifest"), "processor"),
    ("image-platform", ended(255, "exec /usr/bin/tini: exec format error"), "processor"),
    (
        "image-unreachable",
        held("ImagePullBackOff", "Back-off", ("Failed", "Failed pulling: dial tcp: no such host")),
        "Back-off",
    ),
    ("image", held("ErrImagePull", "manifest not found"),
     "cannot get the image gptddp:0.1.0: ErrImagePull: manifest"),
    ("image", init_without_image(), "cannot get the image alpine:3.10: ErrImagePull: manifest"),
    ("pulling", held(HELD, "", ("Scheduled", "to node"), PULL),
     "pulling the image team/big:1 for 55 s"),
    ("secret-missing", held("CreateContainerConfigError", 'secret "hub" not found'),
     'secret "hub"'),
    (
        "configmap-missing",
        held(HELD, "", ("FailedMount", 'for volume "d" : configmap "c" not found')),
        "spec.volumes",
    ),
    (
        "configmap-missing",
        held(HELD, "", ("FailedMount", 'for volume "code" : configmap "a-code-0" not found')),
        "the same submit, with its --code, makes it again",
    ),
    ("key-missing", held("CreateContainerConfigError", KEY), "key token in Secret team/hub"),
    (
        "run-as-root",
        held("CreateContainerConfigError", "container has runAsNonRoot and image will run as root"),
        "runAsUser",
    ),
    ("command", ended(128, START, "StartError"), "mend spec.containers[].command"),
    ("container", held("CreateContainerError", "something else"), "something else"),
    ("out-of-memory", ended(137, "", "OOMKilled"), "its memory of 3Gi (resources.limits.memory)"),
    ("out-of-memory", out_of_memory_before(), "its memory of 7Gi (resources.limits.memory)"),
    ("read-only", ended(1, "OSError: [Errno 30] Read-only file system: '/x'"),
     "mount a volume there"),
    ("permission", ended(1, "PermissionError: [Errno 13] Permission denied: '/runs/a'"), "fsGroup"),
    ("disk-full", ended(1, "OSError: [Errno 28] No space left on device"), "make room"),
    ("crash-loop", held("CrashLoopBackOff"), "crashed 0 times"),
    ("crash", ended(1, "ValueError: no"), "1 (an error): ValueError: no"),
    ("probe", unready(), "its readiness probe fails (spec.containers[].readinessProbe): HTTP"),
    ("probe", lost(("Killing", "Container pytorch failed liveness probe, will be killed")),
     "failed liveness probe"),
    ("probe", lost(("Unhealthy", "Liveness probe failed: ")), "Liveness probe failed (spec"),
    ("crash", other_crashed(), "its container istio-proxy exited with 1 (an error): no token"),
    ("key-missing", key_of_a_mount("secret", {"secret": {"secretName": "hub"}}), "key: token"),
    ("init", init_failed(), "its init container init-pytorch exited with 3"),
    ("init", init(), "init-pytorch has not ended (it waits for the Master)"),
    ("sidecar", with_sidecar(), "has ended with 0, and istio-proxy keeps the pod alive"),
    ("rejected", by_node("UnexpectedAdmissionError", "Allocate failed due to no healthy devices"),
     "node gptddp-worker rejects it before it starts: UnexpectedAdmissionError: Allocate"),
    ("rejected", by_node("OutOfnvidia.com/gpu", "Pod Node didn't have enough resource"),
     "OutOfnvidia.com/gpu: Node didn't"),
    ("node-shutdown", by_node("Terminated", SHUT),
     "node gptddp-worker shuts down, as a spot node may"),
    ("drained", disrupted("EvictionByEvictionAPI"), "evicted through the API"),
    ("tainted", disrupted("DeletionByTaintManager"), "spec.tolerations"),
    ("tainted", lost(("TaintManagerEviction", "Marking for deletion")), "spec.tolerations"),
    ("preempted", taken_before(),
     "preempted by pod u7 on node n1, of a higher priority (spec.priorityClassName), and since"),
    ("preempted", by_node("Preempting", "Preempted in order to admit critical pod"),
     "node gptddp-worker needed its place for a critical pod"),
    ("node-silent", by_node("NodeLost", "Node x which was running pod y is unresponsive"),
     "has not been heard from (NodeLost: Node x"),
    ("evicted-storage", lost(("Evicted", STORAGE)), "raise resources.limits[ephemeral-storage]"),
    ("preempted", disrupted("PreemptionByScheduler"), "spec.priorityClassName"),
    ("preempted", lost(("Preempted", "Preempted by pod u7 on node n1"), code=143),
     "it was preempted by pod u7 on node n1"),
    ("evicted", by_node("Evicted", "The node was low on resource: memory. "),
     "low on resource: memory"),
    ("evicted-storage", by_node("Evicted", STORAGE), "raise resources.limits[ephemeral-storage]"),
    ("pod-deadline", by_node("DeadlineExceeded", "Pod was active too long"),
     "spec.activeDeadlineSeconds"),
    ("node-lost", Facts(job("Running"), [pod(0, metadata={"deletionTimestamp": at(9)})], (), NOW),
     "does not answer"),
    ("node-silent", lost(("NodeNotReady", "Node is not ready")), "a spot node that is gone?"),
    (
        "node-silent",
        Facts(job("Running"), [pod(0, conditions=[{"type": "Ready", "status": "False"}])], (), NOW),
        "not been heard from",
    ),
    ("addresses", held(HELD, "", ("FailedCreatePodSandBox", NO_IP)), "no free address"),
    ("sandbox", held(HELD, "", ("FailedCreatePodSandBox", "no runtime for x is configured")),
     "no runtime for x"),
    ("claim-missing", placed('persistentvolumeclaim "d" not found.'), "no PersistentVolumeClaim d"),
    ("claim-unbound", unbound(), "no volume (runs)"),
    ("claim-lost", placed('persistentvolumeclaim "d" is being deleted.'), "d is being deleted"),
    ("claim-elsewhere", placed(f"{TAINT}2 node(s) had volume node affinity conflict.", **VOLUMES),
     "spec.volumes"),
    ("volume-in-use", held(HELD, "", ("FailedAttachVolume", MULTI)), "ReadWriteOnce"),
    ("volume", held(HELD, "", ("FailedMount", "hostPath type check failed")), "spec.volumes"),
]  # fmt: skip
