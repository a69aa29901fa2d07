"""A cluster's own messages about jobs that do not run, and the cause of each."""

from dataclasses import replace
from datetime import UTC, datetime

from support.api_objects import at, condition, event, job, pod, terminated, unscheduled, waiting

from gptddp.k8s.objects import seconds
from gptddp.k8s.observe.facts import Facts

NOW = seconds(at(0, minute=1))
HELD = "ContainerCreating"


def of(*pods, events=(), state="Running", replicas=1, **known):
    """A job with these pods."""
    return Facts(job(state, replicas=replicas), list(pods), list(events), NOW, **known)


def refused(message, what="Pod", there=0):
    """The operator is refused a pod or a service; `there` pods exist."""
    made = job()
    told = event(made, f"FailedCreate{what}", f"Error creating: {message}")
    return Facts(made, [pod(n) for n in range(there)], [told], NOW)


def placed(*parts, claims=(), reason="Unschedulable", **spec):
    """The scheduler has found no node for a pod."""
    message = f"0/3 nodes are available: {', '.join(parts)}. preemption: 0/3 nodes are available."
    made = unscheduled(0, message)
    made["status"]["conditions"][0]["reason"] = reason
    made["spec"] |= spec
    return of(made, state="Created", claims=dict(claims))


def held(reason, message="", *events, kind="Warning"):
    """A container that waits; with events about its pod, (reason, message) each."""
    made = pod(0, waiting(reason, message), phase="Pending")
    return of(made, events=[event(made, *it, kind=kind) for it in events], state="Created")


def ended(code, message="", reason="Error"):
    return of(pod(0, terminated(code, message, reason)), replicas=4)


def looping(code, told=(), **last):
    """A container that waits to start again, with an event one second before its end."""
    ended = terminated(code, **last)
    made = pod(0, waiting("CrashLoopBackOff", "back-off"), last=ended, restarts=3)
    return of(made, events=[event(made, *told, 29)] if told else ())


def by_node(reason, message):
    made = pod(0, {"waiting": {}}, phase="Failed", reason=reason, message=message)
    made["status"]["containerStatuses"] = []
    return of(made, state="Restarting", replicas=4)


def saying(kind, status, reason="", message="m", **rest):
    """A pod with a condition."""
    told = {"type": kind, "status": status, "reason": reason, "message": message}
    return of(pod(0, conditions=[told], **rest))


def lost(*told, code=137, words=""):
    """Pod 0 was replaced ten seconds ago, and its predecessor left these events."""
    made, new = job("Running", replicas=1), pod(0)
    limited = {"name": "pytorch", "resources": {"limits": {"memory": "7Gi"}}}
    made["spec"]["pytorchReplicaSpecs"]["Worker"]["template"] = {"spec": {"containers": [limited]}}
    exited = event(made, "ExitedWithCode", f"Pod: ns.demo-worker-0 exited with code {code}", 50)
    created = event(made, "SuccessfulCreatePod", "Created pod: demo-worker-0", 51)
    created["count"] = 2
    said = f"Error pod demo-worker-0 container pytorch exitCode: {code} terminated message: "
    ends = [event(made, words, said, 50)] if words else []
    old = [event(pod(0, uid="old"), *it, 49) for it in told]
    return Facts(made, [new], [exited, created, *ends, *old], NOW)


def made_again(count, reason="OutOfcpu", kind="Warning", field=""):
    """`count` pods were made, and each has left one event."""
    events = [
        event(pod(0, uid=f"u{n}"), reason, "Node didn't have enough resource: cpu", n, kind)
        for n in range(count)
    ]
    for it in events:
        it["involvedObject"]["fieldPath"] = field
    return Facts(job("Restarting", replicas=1), [], events, NOW)


def beside(state, main=None, made=None):
    """A pod with a second container."""
    found = pod(0, main)
    other = {"name": "istio-proxy", "ready": False, "state": state}
    found["status"]["containerStatuses"].append(other)
    return Facts(made or job("Running", replicas=1), [found], (), NOW)


def init(state, *events):
    """A pod with an init container; with events about it: (reason, message, second) each."""
    made = pod(0, waiting("PodInitializing"), phase="Pending")
    own = {"name": "init-pytorch", "ready": False, "state": state, "image": "alpine:3.10"}
    made["status"]["initContainerStatuses"] = [own]
    return of(made, events=[event(made, *it) for it in events], state="Created")


def unready(ready=False):
    made = pod(0, ready=ready)
    told = event(made, "Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 5")
    return of(made, events=[told])


def unseen(**spec):
    """Neither a scheduler nor a kubelet has reported anything about a pod."""
    made = pod(0, phase="Pending")
    made["status"] = {"phase": "Pending"}
    made["spec"] = spec
    return of(made, state="Created")


def taken_over():
    """The last step is in another pod's log; since then rank 0 is in this pod."""
    facts = quiet(None, lines=())
    line = "life 2: from memory, step 171 of 400"
    return replace(facts, log=[(datetime.fromtimestamp(facts.now - 9, UTC), line)])


def quiet(last_step_s, now_s=700, lines=("waiting for pods: 1 are here",), label="gptddp"):
    """One pod that has run since second 1; its log has a step, and then these lines."""
    start = datetime.fromtimestamp(seconds(at(0)), UTC)
    steps = [] if last_step_s is None else [last_step_s]
    log = [(datetime.fromtimestamp(start.timestamp() + it, UTC), STEP) for it in steps]
    log += [(datetime.fromtimestamp(start.timestamp() + 9, UTC), it) for it in lines]
    made = job("Running", replicas=1, labels={"app.kubernetes.io/name": label})
    return Facts(made, [pod(0)], (), start.timestamp() + now_s, log=log)


def of_world(*ranks, gap_s=100, nproc="1"):
    """Two pods that have run since second 2; `ranks`: world sizes of steps, `gap_s` apart."""
    facts = quiet(690)
    facts.job["spec"] |= {"nprocPerNode": nproc}
    facts.job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = 2
    first = facts.now - gap_s * len(ranks)
    lines = [STEP.replace("4 ranks", "1 rank" if it == 1 else f"{it} ranks") for it in ranks]
    log = [(datetime.fromtimestamp(first + n * gap_s, UTC), it) for n, it in enumerate(lines)]
    return Facts(facts.job, [pod(0), pod(1)], (), facts.now, log=log)


def named_alike():
    """Events of an earlier job's pods and of endpoints, all with the name of the one new pod."""
    made = job("Created", replicas=1, creationTimestamp=at(30))
    old = [event(pod(0, uid=f"u{n}"), "Failed", "no such image", n) for n in range(5)]
    other = [event(pod(0, uid=f"e{n}"), "FailedToUpdateEndpoint", "modified", 40) for n in range(5)]
    for it in other:
        it["involvedObject"]["kind"] = "Endpoints"
    return Facts(made, [pod(0, waiting(HELD), phase="Pending")], [*old, *other], NOW)


def final(message="", *pods, **metadata):
    return Facts(job(condition("Failed", message=message), **metadata), list(pods), (), NOW)


STEP = "step 40/400  loss 3.2144  lr 1.00e-03  45.2 k tok/s  4 ranks  ETA 1 min 23 s"
TAINT, TAINTED = "1 node(s) had untolerated taint(s)", "2 node(s) had untolerated taint(s)"
NOT_MATCHED = "2 node(s) didn't match Pod's node affinity/selector"
ELSEWHERE = job()
ELSEWHERE["spec"]["runPolicy"]["managedBy"] = "kueue.x-k8s.io/multikueue"
ASKS = {"containers": [{"name": "pytorch", "resources": {"requests": {"cpu": "64"}}}]}
CLAIM = {"volumes": [{"name": "a", "persistentVolumeClaim": {"claimName": "runs"}}]}
PENDING = {"metadata": {"name": "runs"}, "status": {"phase": "Pending"}}
NO_CLASS = {**PENDING, "kind": "PersistentVolumeClaim", "metadata": {"name": "runs", "uid": "c1"}}
UNBOUND = "pod has unbound immediate PersistentVolumeClaims"
PULL = ("Pulling", 'Pulling image "team/big:1"')
HELD_BACK = {"deletionTimestamp": at(59), "finalizers": ["example.com/hold"]}
MULTI = 'Multi-Attach error for volume "pv" Volume is already used by pod(s) x'
BACKED_OFF = made_again(5)
BACKED_OFF.events.append(event(pod(0, uid="u4"), "BackOff", "Back-off", 9))
SIDECAR = init({"running": {}})
NATIVE = {"name": "init-pytorch", "restartPolicy": "Always"}
SIDECAR.pods[0]["spec"]["initContainers"] = [NATIVE]
DONE = terminated(0, reason="Completed")
PROBE = ("Unhealthy", "Liveness probe failed: ")

# The cause, the facts, words of the sentence.
CASES = [
    ("pod-security", refused('pods "demo-worker-0" is forbidden: violates PodSecurity "restricted"'
     ": x"), 'namespace\'s Pod Security refuses its pods: violates PodSecurity "restricted": x'),
    ("quota", refused('pods "demo-worker-0" is forbidden: exceeded quota: small, requested: pods='),
     "no room in the namespace's quota: exceeded quota: small, requested"),
    ("refused", refused('serviceaccount "me" not found'), 'refused: serviceaccount "me" not found'),
    ("refused", refused("63 characters", "Service", 4), "services are refused: Error creating: 63"),
    ("no-operator", Facts(job(), [], (), NOW), "no training operator reacts to it"),
    ("no-operator", Facts(ELSEWHERE, [], (), NOW), "multikueue has not taken it up (spec."),
    ("in-vain", made_again(5), "created 5 times in 60 s, and its container never started: OutOfc"),
    ("in-vain", BACKED_OFF, "OutOfcpu: Node didn't have enough resource: cpu; run"),
    ("in-vain", made_again(5, "Started", "Normal", "spec.initContainers{a}"), "give no reason"),
    ("claim-missing", placed("persistentvolumeclaim not found", claims={"runs": None}, **CLAIM),
     "there is no PersistentVolumeClaim runs: create it"),
    ("claim-unbound", placed(UNBOUND, claims={"runs": PENDING}, **CLAIM),
     f"its PersistentVolumeClaim runs has no volume: 0/3 nodes are available: {UNBOUND}"),
    ("claim-unbound", replace(placed(UNBOUND, claims={"runs": NO_CLASS}, **CLAIM), events=[
     event(NO_CLASS, "ProvisioningFailed", 'storageclass "fast" not found')]),
     'its PersistentVolumeClaim runs has no volume: storageclass "fast" not found; see'),
    ("no-room", placed(TAINT, "2 Insufficient cpu", **ASKS), f"{TAINT}, 2 Insufficient cpu; spec."
     "tolerations: none; resources.requests[cpu]: 64; see"),
    ("no-room", placed("2 Insufficient cpu", claims={"runs": PENDING}, **CLAIM), "Insufficient"),
    ("taints", placed(TAINTED, tolerations=[{"key": "a"}]), f"{TAINTED}; spec.tolerations: a"),
    ("taints", placed(TAINT, NOT_MATCHED, nodeSelector={"disk": "ssd"}),
     "spec.nodeSelector: disk=ssd"),
    ("taints", placed(NOT_MATCHED), "spec.affinity.nodeAffinity"),
    ("pod", placed(TAINT, "2 of a reason that is new"), "2 of a reason that is new"),
    ("pod", placed('persistentvolumeclaim "d" is being deleted'), "d\" is being deleted"),
    ("pod", placed("", reason="SchedulingGated"), "SchedulingGated: 0/3 nodes"),
    ("image-denied", held("ErrImagePull", "401 Unauthorized"), "ErrImagePull: 401 Unauthorized; "
     "does the image exist (--image), and may the pod pull it (--image-pull-secret)?"),
    ("image-denied", held("ImagePullBackOff", "Back-off", ("Failed", "pull access denied")),
     "Back-off: pull access denied; does the image"),
    ("image", held("ErrImagePull", "manifest not found"),
     "cannot get the image gptddp:0.2.0: ErrImagePull: manifest not found; --image"),
    ("image", held("InvalidImageName"), "cannot get the image gptddp:0.2.0: InvalidImageName; "),
    ("image", init(waiting("ErrImagePull", "m")), "cannot get the image alpine:3.10: ErrImagePull"),
    ("config", held("CreateContainerConfigError", 'secret "hub" not found'),
     'cannot start its container pytorch: CreateContainerConfigError: secret "hub" not found; see'),
    ("pod", held("CreateContainerError", "something else"), "CreateContainerError: something else"),
    ("starting", Facts(job("Created"), [], (), NOW), "its pods have not been created yet"),
    ("starting", Facts(job("Created"), [], (), NOW, unseen="no right"), "is unknown: no right"),
    ("starting", unseen(schedulerName="volcano"), "waits for its scheduler volcano (spec.schedule"),
    ("starting", unseen(nodeName="node77"), "starting on node node77"),
    ("starting", held(HELD, "", PULL, kind="Normal"), 'Pulling image "team/big:1"'),
    ("evicted", by_node("UnexpectedAdmissionError", "Allocate failed due to no healthy devices."),
     "its node gptddp-worker has ended or refused it: UnexpectedAdmissionError: Allocate failed"),
    ("evicted", by_node("Evicted", "The node was low on resource: memory. "), "low on resource"),
    ("evicted", final("x", pod(0, terminated(137), phase="Failed", reason="Evicted", message="m")),
     "its node gptddp-worker has ended or refused it: Evicted: m"),
    ("sidecar", beside({"running": {}}, DONE), "has ended with 0, and istio-proxy keeps the pod"),
    ("out-of-memory", ended(137, "", "OOMKilled"), "its memory of 3Gi (resources.limits.memory)"),
    ("out-of-memory", looping(137, reason="OOMKilled"), "crashed 3 times and waits to start"),
    ("crash", ended(1, "ValueError: no"), "exited with 1 (an error): ValueError: no"),
    ("crash", ended(128, "exec: pythn: not found", "StartError"), "not be started): exec: pythn:"),
    ("crash", looping(1, message="no luck"), "crashed 3 times and waits to start again: exited wi"),
    ("crash", looping(1, PROBE, message="no luck"), "exited with 1 (an error): no luck"),
    ("crash", looping(137, PROBE), "137 (SIGKILL): Unhealthy: Liveness probe failed"),
    ("crash", looping(137, ("Unhealthy", "Readiness probe failed: ")), "SIGKILL from outside"),
    ("crash", beside(terminated(1, "no token")), "its container istio-proxy exited with 1 (an err"),
    ("crash", init(terminated(3, "no host")), "its container init-pytorch exited with 3 (loss or"),
    ("node-lost", of(pod(0, metadata={"deletionTimestamp": at(9)})), "does not answer"),
    ("node-lost", saying("Ready", "False"), "its node gptddp-worker has not been heard from"),
    ("drained", saying("DisruptionTarget", "True", "EvictionByEvictionAPI", "Eviction API: m"),
     "it is taken off its node: EvictionByEvictionAPI: Eviction API: m"),
    ("pod", of(pod(0, terminated(130), phase="Failed", metadata=HELD_BACK)), "example.com/hold"),
    ("pod", saying("Ready", "False", "ReadinessGatesNotReady"), "ReadinessGatesNotReady: m"),
    ("pod", unready(), "Unhealthy: Readiness probe failed: HTTP probe failed with statuscode: 5"),
    ("pod", held(HELD, "", ("FailedAttachVolume", MULTI)), f"FailedAttachVolume: {MULTI}"),
    ("pod", held(HELD, "", ("FailedMount", 'configmap "demo-code-0" not found')),
     'FailedMount: configmap "demo-code-0" not found; the same submit creates it again'),
    ("init", init({"running": {}}), "init-pytorch has not ended (it waits for the Master)"),
    ("init", init({"running": {}}, ("FailedMount", "m", 9), ("Started", "m", 12)), "has not ended"),
    ("replaced", lost(code=139), "exited with 139 (SIGSEGV); it was replaced"),
    ("replaced", lost(words="OOMKilled"), "its memory of 7Gi (resources.limits.memory)"),
    ("replaced", lost(("Preempted", "Preempted by pod u7 on node n1"), code=143),
     "exited with 143 (SIGTERM): Preempted: Preempted by pod u7 on node n1; it was replaced"),
    ("replaced", lost(("Evicted", "low on memory. "), words="OOMKilled"), "its memory of 7Gi"),
    ("no-step", quiet(None),
     "1 of 1 pods run, and not one step was logged for 699 s; the log's last line: waiting for"),
    ("no-step", quiet(10, lines=()), "no new step was logged for 690 s; the log's last line: step"),
    ("no-step", quiet(None, lines=()), "for 699 s; the log is empty"),
    ("left-out", of_world(2, 1, 1, 1), "2 pods are ready, and each step is done by 1 of 2 ranks"),
    ("limit", final("it reached the backoff limit"), "the backoff limit (spec.runPolicy)"),
    ("failed", final("x", pod(0, terminated(2))), "exited with 2 (bad configuration or data)"),
    ("failed", final("it is so"), "it is so"),
    ("failed-container", beside(terminated(1, "no token"), DONE, job("Failed")),
     "its container istio-proxy exited with 1 (an error): no token"),
    ("deleting", Facts(job("Running", deletionTimestamp=at(50)), [pod(0)], (), NOW),
     "it is being deleted; 1 pods are still stopping"),
    ("deleting", Facts(job(deletionTimestamp=at(50), finalizers=["foregroundDeletion"]), [pod(0)]),
     "it is being deleted; 1 pods are still stopping"),
    ("deleting", Facts(job("Running", **HELD_BACK), [pod(0)], (), NOW),
     "it is being deleted, and metadata.finalizers hold it: example.com/hold"),
    ("suspended", Facts(job(suspend=True), [], (), NOW), "spec.runPolicy.suspend"),
]  # fmt: skip
# No causes, but each would be one a little later, or if it happened again.
WELL = [
    Facts(job("Created", "Running"), [pod(n) for n in range(4)], (), NOW),
    Facts(job("Succeeded"), [pod(0, DONE)], (), NOW),
    quiet(690),  # a step ten seconds ago
    taken_over(),
    quiet(None, now_s=200),  # it has just begun
    quiet(None, label="theirs"),  # another trainer, whose lines are unknown
    of_world(2, 1, 1),  # for less than two minutes
    of_world(1, 1, 1, 2),
    of_world(2, 2, 2, gap_s=400),  # its steps take long
    of_world(*[1] * 20, gap_s=10, nproc="auto"),  # the expected number is unknown
    made_again(2),
    unready(ready=True),  # it has become ready
    saying("DisruptionTarget", "False"),
    saying("PodScheduled", "True"),
    of(pod(0, last=terminated(1), restarts=1)),  # it runs again
    SIDECAR,
    saying("Ready", "False", "PodFailed"),  # its kubelet is ending it
    named_alike(),
    held(HELD, "", ("DNSConfigForming", "Nameserver limits were exceeded")),
]
