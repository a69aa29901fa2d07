"""What a real cluster has said of jobs that were broken in odd ways, and the cause that it is."""

from datetime import UTC, datetime

from support.api_objects import at, event, job, pod, terminated, waiting
from support.cause_cases import HELD, NOW, TAINT, ended, held, lost, other_crashed, placed, quiet

from gptddp.k8s.observe.facts import Facts

NO_START = "runc create failed: container init was OOM-killed (memory limit too low?): unknown"
HELD_BACK = {"deletionTimestamp": at(59), "finalizers": ["example.com/hold"]}
ONE_POD = "ReadWriteOncePod access mode already in-use by another pod."


def not_ready(reason, message=""):
    """Its containers are ready, and it is not; a kubelet says why, the node controller does not."""
    said = {"type": "Ready", "status": "False", "reason": reason, "message": message}
    return Facts(job("Running", replicas=1), [pod(0, conditions=[said])], (), NOW)


def not_taken_up(now=NOW):
    """spec.nodeName names a node that does not exist: nobody says anything."""
    made = pod(0, phase="Pending", node="node77")
    made["status"] = {"phase": "Pending"}
    return Facts(job("Created", replicas=1), [made], (), now)


def finalized():
    made = pod(0, terminated(130), phase="Failed", metadata=HELD_BACK)
    return Facts(job("Restarting", replicas=1), [made], (), NOW)


def beside_failed():
    """The training has ended well, and the container beside it has not."""
    facts = other_crashed()
    facts.pods[0]["status"]["containerStatuses"][0]["state"] = terminated(0, reason="Completed")
    return Facts(job("Failed", replicas=1), facts.pods, (), NOW)


def init_in_vain():
    """Each pod's init container has ended before anybody looked; its events do not say how."""
    events = [event(pod(0, uid=f"u{n}"), "Started", "Started", n, "Normal") for n in range(5)]
    for it in events:
        it["involvedObject"]["fieldPath"] = "spec.initContainers{before}"
    return Facts(job("Restarting", replicas=1), [], events, NOW)


def crashed_beside_a_probe():
    """The readiness probe fails since there is a container, which ends of itself."""
    last = terminated(1, "ValueError: no luck")
    made = pod(0, waiting("CrashLoopBackOff"), last=last, restarts=3)
    told = event(made, "Unhealthy", "Readiness probe failed: ", 29)
    return Facts(job("Running", replicas=1), [made], [told], NOW)


def ended_by_a_probe():
    made = pod(0, waiting("CrashLoopBackOff"), last=terminated(137), restarts=3)
    told = event(made, "Unhealthy", "Startup probe failed: ", 29)
    return Facts(job("Running", replicas=1), [made], [told], NOW)


def begun_after(reason, message):
    """An init container runs since what held the pod back is over."""
    made = pod(0, waiting("PodInitializing"), phase="Pending")
    state = {"name": "init-pytorch", "ready": False, "state": {"running": {}}}
    made["status"]["initContainerStatuses"] = [state]
    events = [event(made, reason, message, 9), event(made, "Started", "Started", 12, "Normal")]
    return Facts(job("Created", replicas=1), [made], events, NOW)


def named_alike():
    """Pods of an earlier job of the name, endpoints of the pod's name, and one pod that is new."""
    made = job("Created", replicas=1, creationTimestamp=at(30))
    old = [event(pod(0, uid=f"u{n}"), "Failed", "no such image", n) for n in range(5)]
    other = [event(pod(0, uid=f"e{n}"), "FailedToUpdateEndpoint", "modified", 40) for n in range(5)]
    for it in other:
        it["involvedObject"]["kind"] = "Endpoints"
    return Facts(made, [pod(0, waiting(HELD), phase="Pending")], [*old, *other], NOW)


ODD_CASES = [
    ("hook", lost(("FailedPostStartHook", "PostStartHook failed")),
     "its postStart hook failed (spec.containers[].lifecycle.postStart)"),
    ("pod-deadline", lost(("DeadlineExceeded", "Pod was active on the node longer")),
     "spec.activeDeadlineSeconds"),
    ("readiness-gate", not_ready("ReadinessGatesNotReady", '"example.com/lb" does not exist'),
     '(spec.readinessGates) is not met: "example.com/lb" does not exist'),
    ("not-taken-up", not_taken_up(), "its node node77 has not taken it up for 59 s"),
    ("finalizers", finalized(), "metadata.finalizers hold it: example.com/hold"),
    ("finalizers", Facts(job("Running", **HELD_BACK), [pod(0)], (), NOW),
     "it is being deleted, and metadata.finalizers hold it: example.com/hold"),
    ("failed-container", beside_failed(), "its container istio-proxy exited with 1 (an error): no"),
    ("volume-in-use", placed(f"{TAINT}2 node(s) unavailable due to PersistentVolumeClaim with "
                             f"{ONE_POD}"), ONE_POD[:-1]),
    ("unschedulable", placed(f"{TAINT}2 cannot allocate all claims."), "2 cannot allocate all"),
    ("out-of-memory", held(HELD, "", ("FailedCreatePodSandBox", NO_START)),
     "too little to start with (resources.limits.memory)"),
    ("container", ended(128, "error during container init: mkdir /proc/x: no", "StartError"),
     "mend spec.containers[].workingDir"),
    ("container", held("CreateContainerConfigError", "missing value for NOPE"), "its subPath"),
    ("in-vain", init_in_vain(), "its init container before (spec.initContainers) ends badly"),
    ("no-step", quiet(None, lines=()), "for 699 s; the log is empty"),
    ("crash-loop", crashed_beside_a_probe(), "exited with 1 (an error): ValueError: no luck"),
    ("probe", ended_by_a_probe(), "Startup probe failed (spec.containers[].startupProbe)"),
    ("init", begun_after("FailedMount", 'configmap "late" not found'), "init-pytorch has not"),
    ("init", begun_after("FailedCreatePodSandBox", "no address"), "init-pytorch has not ended"),
]  # fmt: skip
FULL = "step 40/400  loss 3.2144  lr 1.00e-03  45.2k tok/s  2 ranks  1:23 left"
FEWER = FULL.replace("2 ranks", "1 rank")


def of_world(*lines, gap_s=100, nproc="1"):
    """Two pods that run since second 2, and a line of a step every `gap_s` until now."""
    facts = quiet(690)
    facts.job["spec"] |= {"nprocPerNode": nproc}
    facts.job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = 2
    first = facts.now - gap_s * len(lines)
    log = [(datetime.fromtimestamp(first + n * gap_s, UTC), it) for n, it in enumerate(lines)]
    return Facts(facts.job, [pod(0), pod(1)], (), facts.now, log=log)


ODD_CASES.append(
    (
        "left-out",
        of_world(FULL, FEWER, FEWER, FEWER),
        "2 pods are ready, and each step is done by 1",
    )
)
WELL = [
    of_world(FULL, FEWER, FEWER),  # for less than two minutes
    of_world(FEWER, FEWER, FEWER, FULL),
    of_world(*[FEWER] * 20, gap_s=10, nproc="auto"),  # nobody says how many there are to be
    not_ready("PodFailed"),  # it is being ended by its kubelet, on a node that is well
    not_taken_up(NOW - 45),
    named_alike(),
]
