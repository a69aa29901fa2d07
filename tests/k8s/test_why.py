"""A job's state and why it does not run, from objects in the shapes of the API."""

import pytest
from support.api_objects import at, condition, event, job, pod, terminated, unscheduled, waiting

from gptddp.k8s import exit_codes
from gptddp.k8s.objects import seconds
from gptddp.k8s.observe import why
from gptddp.k8s.observe.facts import Facts

NOW = seconds(at(0, minute=1))


def sentence(job, pods=(), events=(), now=NOW):
    return why.why(Facts(job, pods, events, now))


@pytest.mark.parametrize(
    ("made", "state"),
    [
        (job(), "Pending"),
        (job("Created"), "Pending"),
        (job("Created", "Running"), "Running"),
        (job("Running", "Created"), "Running"),
        (job("Created", "Restarting"), "Restarting"),
        (job("Created", condition("Running", "False"), "Succeeded"), "Succeeded"),
        (job("Succeeded", condition("Running", "False")), "Succeeded"),
        (job("Failed", condition("Restarting", "False"), condition("Running", "False")), "Failed"),
        (job("Created", "Suspended", condition("Running", "False"), suspend=True), "Suspended"),
        (job("Created", suspend=True), "Suspended"),
        (job("Created", "Suspended", condition("Running", "False")), "Pending"),
        (job("Created", condition("Suspended", "False"), "Running"), "Running"),
        (job("Succeeded", deletionTimestamp=at(50)), "Deleting"),
        (job("Ripening"), "Unknown"),
    ],
)
def test_the_state_is_what_holds_now(made, state):
    """By type and status: neither the last condition nor one that is False decides."""
    assert why.state(made) == state


PSA = (
    'Error creating: pods "demo-worker-0" is forbidden: violates PodSecurity "restricted:latest": '
    'runAsNonRoot != true (pod or container "pytorch" must set securityContext.runAsNonRoot=true)'
)
QUOTA = (
    'Error creating: pods "demo-worker-1" is forbidden: exceeded quota: small, requested: '
    "limits.cpu=1, used: limits.cpu=1, limited: limits.cpu=1"
)
ACCOUNT = (
    'Error creating: pods "demo-worker-0" is forbidden: error looking up service account '
    'default/demo: serviceaccount "demo" not found'
)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (PSA, "the namespace's Pod Security (restricted:latest) refuses its pods: runAsNonRoot"),
        (QUOTA, "no room in the namespace's quota: small, requested: limits.cpu=1"),
        (
            ACCOUNT,
            "there is no ServiceAccount demo, which its pods name (spec.serviceAccountName); run ",
        ),
        ('Error creating: Pod "demo-worker-2" is invalid: x', "its pods are refused: Pod"),
    ],
)
def test_refused_pods_are_told_from_events(message, expected):
    """The status is empty then; the event is the only word there is."""
    made = job()
    made["status"] = {}
    assert sentence(made, events=[event(made, "FailedCreatePod", message)]).startswith(expected)


def test_a_refusal_that_is_over_is_not_told():
    """The pod exists by now, or has been created since, or the event is of an older job."""
    made = job("Running")
    refused = event(made, "FailedCreatePod", QUOTA)
    assert "quota" in sentence(made, [pod(0)], [refused])
    assert sentence(made, [pod(n) for n in range(4)], [refused]) == ""
    created = event(made, "SuccessfulCreatePod", "Created pod: demo-worker-1", second=9)
    assert "quota" not in sentence(made, [pod(0)], [refused, created])
    refused["involvedObject"]["uid"] = "of an older job"
    assert sentence(made, [pod(0)], [refused]) == ""


def test_refused_services_are_told():
    """Such as for a name that is too long."""
    made, message = job(), 'Error creating: Service "demo-worker-0" is invalid: metadata.name'
    told = event(made, "FailedCreateService", message)
    assert sentence(made, [pod(n) for n in range(4)], [told]).startswith("its services are refused")


FULL = (
    "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient cpu. no new "
    "claims to deallocate, preemption: 0/3 nodes are available: 1 Preemption is "
    "not helpful for scheduling, 2 No preemption victims found for incoming pod."
)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (FULL, "pods demo-worker-2, demo-worker-3: no node takes it: 0/3 nodes are available: "),
        (
            '0/3 nodes are available: persistentvolumeclaim "data" not found. preemption: 0/3',
            "pods demo-worker-2, demo-worker-3: there is no PersistentVolumeClaim data",
        ),
        (
            "0/3 nodes are available: pod has unbound immediate PersistentVolumeClaims.",
            "pods demo-worker-2, demo-worker-3: a PersistentVolumeClaim of it has no volume",
        ),
    ],
)
def test_pods_without_a_node_are_named_together(message, expected):
    """In the scheduler's words, without what it says on preemption; also of a job that runs."""
    pods = [pod(0), pod(1), unscheduled(2, message), unscheduled(3, message)]
    told = sentence(job("Running"), pods)
    assert told.startswith(expected) and "reempt" not in told and "deallocate" not in told


@pytest.mark.parametrize("reason", ["ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull"])
def test_an_image_that_cannot_be_had(reason):
    """The image and the kubelet's words."""
    held = pod(0, waiting(reason, "not found"), phase="Pending")
    assert sentence(job("Created"), [held]).startswith(
        f"pod demo-worker-0: cannot get the image gptddp:0.1.0: {reason}: not found"
    )


def test_a_container_that_cannot_be_configured():
    """A Secret or ConfigMap that is missing, a user id that is not allowed."""
    held = pod(0, waiting("CreateContainerConfigError", 'secret "key" not found'), phase="Pending")
    assert 'CreateContainerConfigError: secret "key" not found' in sentence(job("Created"), [held])


def test_a_container_that_ran_out_of_memory():
    """Its limit is named; it comes before what merely crashed."""
    end = terminated(137, reason="OOMKilled")
    held = pod(2, waiting("CrashLoopBackOff"), last=end, restarts=4)
    told = sentence(job("Running"), [pod(0, terminated(1)), held])
    assert "crashed 4 times" in sentence(job("Running"), [held]) and "its memory of 3Gi" in told


def test_a_crash_loop_tells_what_it_ended_with():
    """Exit code, meaning and last words of the last container."""
    last = terminated(1, "Traceback (most recent call last):\nValueError: no such thing\n")
    held = pod(1, waiting("CrashLoopBackOff"), last=last, restarts=3)
    assert sentence(job("Running"), [held]) == (
        "pod demo-worker-1: crashed 3 times and waits to start again: exited with 1 (an error): "
        "ValueError: no such thing; see `kubectl logs demo-worker-1 -c pytorch --previous`"
    )


def test_a_lost_node_is_told_when_the_grace_is_over():
    """A pod that should be gone: its node, and both ways out."""
    leaving = pod(3, metadata={"deletionTimestamp": at(40)}, node="gptddp-worker2")
    told = sentence(job("Restarting"), [leaving])
    assert "its node gptddp-worker2 does not answer" in told
    assert "kubectl delete pod demo-worker-3 --force" in told
    assert sentence(job("Restarting"), [leaving], now=seconds(at(30))) == ""


def test_a_silent_node_is_told_before_its_pods_are_moved():
    """The pod is not Ready though its containers, as last heard, are."""
    silent = pod(0, conditions=[{"type": "Ready", "status": "False"}])
    assert "its node gptddp-worker has not been heard from; see `kubectl" in sentence(
        job("Running"), [silent]
    )
    assert (
        sentence(job("Running"), [pod(0, conditions=[{"type": "Ready", "status": "True"}])]) == ""
    )


def test_a_volume_that_does_not_mount():
    """From the event of this very pod, while its container is being created."""
    made = pod(0, waiting("ContainerCreating"), phase="Pending")
    told = event(made, "FailedMount", 'MountVolume.SetUp failed for volume "runs": timed out')
    assert "its volumes do not mount (spec.volumes): MountVolume.SetUp" in sentence(
        job("Created"), [made], [told]
    )
    assert "mount" not in sentence(job("Running"), [pod(0)], [told])


def test_a_pod_that_was_replaced_is_told_for_a_while():
    """Half a minute after one loss; minutes where it comes again and again; never an exit by 0."""
    made, pods = job("Running"), [pod(n) for n in range(4)]
    lost = event(
        made, "ExitedWithCode", "Pod: a-b.demo-worker-2 exited with code 137", kind="Normal"
    )
    new = event(made, "SuccessfulCreatePod", "Created pod: demo-worker-2", kind="Normal")
    new["count"], lost["count"] = 2, 40  # the operator tells one exit many times
    expected = (
        "pod demo-worker-2: exited with 137 (SIGKILL from outside, as when its node shuts down)"
    )
    first = sentence(made, pods, [lost, new], seconds(at(20)))
    see = "; see `kubectl get events --field-selector involvedObject.name=demo-worker-2`"
    assert first == f"{expected}; it was replaced{see}"
    assert sentence(made, pods, [lost, new]) == ""
    new["count"] = 8
    assert sentence(made, pods, [lost, new]) == (
        f"{expected}; it was replaced, 7 times by now{see}"
    )
    words = "Error pod demo-worker-2 container pytorch exitCode: 137 terminated message: "
    words = event(made, "OOMKilled", words)
    assert "more than its memory" in sentence(made, pods, [words, lost, new])
    new["count"] = 1  # not replaced: its container restarts
    assert sentence(made, pods, [lost, new], seconds(at(20))) == ""
    new["count"], lost["message"] = 2, lost["message"].replace("137", "0")
    assert sentence(made, pods, [lost, new], seconds(at(20))) == ""


def test_a_suspended_job_says_how_to_go_on():
    """By hand, or by the queue that holds it."""
    assert sentence(job(suspend=True)) == (
        "it is suspended (spec.runPolicy.suspend); run `gptddp-k8s resume demo`"
    )
    queued = job(suspend=True, labels={"kueue.x-k8s.io/queue-name": "team"})
    assert sentence(queued).startswith("it waits in the queue team; see `kubectl describe")
    assert why.state(queued) == "Queued"
    queued["status"]["local"] = True
    assert why.state(queued) == "Suspended"


def test_nobody_reacts_without_an_operator():
    """No condition, no pod and no event, for longer than an operator ever takes."""
    made = job()
    assert sentence(made, now=seconds(at(10))) == "its pods have not been created yet"
    assert sentence(made, now=seconds(at(20))).startswith("no training operator reacts to it")
    refused = [event(made, "FailedCreatePod", PSA)]
    assert "operator" not in sentence(made, events=refused, now=seconds(at(20)))
    made["spec"]["runPolicy"]["managedBy"] = "kueue.x-k8s.io/multikueue"
    assert sentence(made).startswith(
        "kueue.x-k8s.io/multikueue has not taken it up (spec.runPolicy.managedBy)"
    )


def test_the_most_important_cause_comes_first():
    """A refused pod before one without a node, before an image, before a crash."""
    made = job("Created", replicas=5)
    pods = [
        pod(0, terminated(1)),
        pod(1, waiting("ErrImagePull"), phase="Pending"),
        unscheduled(2, FULL),
        pod(3, waiting("ContainerCreating"), phase="Pending"),
    ]
    refused = event(made, "FailedCreatePod", QUOTA.replace("worker-1", "worker-4"))
    found = why.causes(Facts(made, pods, [refused], NOW))
    assert [cause.id for cause in found] == ["quota", "no-room", "image", "crash"]
    assert sentence(made, pods[3:]) == "pod demo-worker-3: on its way on node gptddp-worker"


WORDS = """step 40/400  loss 3.2144  lr 1.00e-03  45.2k tok/s  4 ranks  1:23 left
gptddp.launch: the group is lost (ChildFailedError: x); joining again in 0.5 s
gptddp.launch: rank 2: shard 00003.parquet of /data cannot be read: page checksum
    row group 7: prepare the dataset again
W1121 09:03:11.123 torch/distributed/elastic/agent: closing
"""


def test_a_failed_job_tells_the_pod_the_code_and_the_reason():
    """The first final exit code with a rank's words; a pod that was only stopped is not it."""
    pods = [
        pod(0, terminated(143, "stopped", second=20), phase="Failed"),
        pod(1, terminated(2, WORDS, second=31), phase="Failed"),
        pod(2, terminated(2, "gptddp.launch: something", second=30), phase="Failed"),
    ]
    assert sentence(job("Failed"), pods) == (
        "pod demo-worker-1: exited with 2 (bad configuration or data): rank 2: shard 00003.parquet "
        "of /data cannot be read: page checksum row group 7: prepare the dataset again; see "
        "`gptddp-k8s logs demo`"
    )


def test_a_failed_job_whose_pods_are_gone_is_told_from_events():
    """One event of the operator's has the exit code, another the container's last words."""
    made = job("Failed")
    told = event(made, "ExitedWithCode", "Pod: default.demo-worker-3 exited with code 4")
    expected = "pod demo-worker-3: exited with 4 (no valid checkpoint)"
    assert sentence(made, [], [told]).startswith(f"{expected} (the pod and its log are gone); see")
    words = "Error pod demo-worker-3 container pytorch exitCode: 4 terminated message: step 1\n"
    words = event(made, "Error", f"{words}gptddp.launch: rank 0: all are broken\nW1121 agent")
    assert sentence(made, [], [words, told]).startswith(f"{expected}: rank 0: all are broken (the")


def test_a_limit_of_the_job_is_its_reason():
    """No single pod is, where the operator says that a limit was reached."""
    limit = "PyTorchJob demo has failed because it has reached the specified backoff limit"
    failed = condition("Failed", message=limit)
    found = sentence(job(failed), [pod(0, terminated(137), phase="Failed")])
    assert found.startswith(f"{limit} (spec.runPolicy); see")


def test_a_job_that_is_well_has_nothing_to_say():
    """Running with all of its pods, or succeeded."""
    pods = [pod(n) for n in range(4)]
    assert sentence(job("Created", "Running"), pods) == ""
    assert sentence(job("Succeeded"), [pod(0, terminated(0, reason="Completed"))]) == ""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("", ""),
        ("hello\n\n", "hello"),
        ("gptddp.launch: two\nlines \nW1121 09:03 agent\nmore\n", "two lines"),
        ("a\ngptddp.launch: the group is lost (x)\nKilled\n", "Killed"),
        ("gptddp.launch: rank 1: no\ngptddp.launch: the group is lost\n", "rank 1: no"),
        ("x" * 900, "x" * 497 + "..."),
    ],
)
def test_the_reason_is_found_among_last_words(message, expected):
    """The rank's line, else the launcher's, else the last."""
    assert exit_codes.reason(message) == expected


def test_exit_codes_have_meanings():
    """Ours, the shell's, and signals."""
    assert exit_codes.meaning(3) == "3 (loss or gradient not finite)"
    assert exit_codes.meaning(139) == "139 (SIGSEGV)" and exit_codes.meaning(255) == "255"
