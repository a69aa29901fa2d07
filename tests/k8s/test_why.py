"""A job's state, and which observation is the cause why it does not run."""

import pytest
from support.api_objects import at, condition, event, job, pod, terminated, waiting

from gptddp.k8s import exit_codes
from gptddp.k8s.objects import seconds
from gptddp.k8s.observe import why
from gptddp.k8s.observe.facts import Facts

NOW = seconds(at(0, minute=1))
TEAM = {"kueue.x-k8s.io/queue-name": "team"}


def sentence(job, pods=(), events=(), now=NOW):
    return why.why(Facts(job, pods, events, now))


@pytest.mark.parametrize(
    ("made", "state"),
    [
        (job(), "Pending"),
        (job("Created"), "Pending"),
        (job("Created", "Running"), "Running"),
        (job("Running", "Created"), "Running"),
        (job("Created", "Running", "Restarting"), "Restarting"),
        (job(suspend=True, labels=TEAM), "Queued"),
        ({**job(suspend=True, labels=TEAM), "status": {"local": True}}, "Suspended"),
        (job("Created", condition("Running", "False"), "Succeeded"), "Succeeded"),
        (job("Succeeded", condition("Running", "False")), "Succeeded"),
        (job("Failed", condition("Restarting", "False"), condition("Running", "False")), "Failed"),
        (job("Created", "Suspended", condition("Running", "False"), suspend=True), "Suspended"),
        (job("Created", suspend=True), "Suspended"),
        (job("Created", "Suspended", condition("Running", "False")), "Pending"),
        (job("Created", condition("Suspended", "False"), "Running"), "Running"),
        (job("Succeeded", deletionTimestamp=at(50)), "Deleting"),
    ],
)
def test_the_state_follows_from_the_true_conditions(made, state):
    """The state depends neither on the order of the conditions nor on conditions that are False."""
    assert why.state(made) == state


QUOTA = 'Error creating: pods "demo-worker-1" is forbidden: exceeded quota: small'


def test_a_past_refusal_is_not_reported():
    """The pod exists now, or has been created since, or the event is about an older job."""
    made = job("Running")
    refused = event(made, "FailedCreatePod", QUOTA)
    assert "quota" in sentence(made, [pod(0)], [refused])
    other = event(made, "SuccessfulCreatePod", "Created pod: demo-worker-2", second=9)
    assert "quota" in sentence(made, [pod(0)], [refused, other])
    assert sentence(made, [pod(n) for n in range(4)], [refused]) == ""
    assert sentence(made, [pod(0), pod(1)], [refused]) == ""
    created = event(made, "SuccessfulCreatePod", "Created pod: demo-worker-1", second=9)
    assert sentence(made, [pod(0)], [refused, created]) == ""
    refused["involvedObject"]["uid"] = "of an older job"
    assert sentence(made, [pod(0)], [refused]) == ""


def test_a_refusal_without_a_pods_name_counts_for_any_pod():
    """It is reported until all pods exist; a refusal of services, until one is created."""
    made = job("Running")
    told = event(made, "FailedCreatePod", "Error creating: failed calling webhook")
    assert sentence(made, [pod(0)], [told]).startswith("its pods are refused: failed calling")
    assert sentence(made, [pod(n) for n in range(4)], [told]) == ""
    told = event(made, "FailedCreateService", "63 characters")
    assert "services are refused" in sentence(made, [pod(n) for n in range(4)], [told])
    created = event(made, "SuccessfulCreateService", "Created service", second=9)
    assert sentence(made, [pod(n) for n in range(4)], [told, created]) == ""


def test_a_job_without_any_reaction_has_no_operator():
    """It has no condition, no pod and no event for longer than an operator ever takes."""
    made = job()
    assert sentence(made, now=seconds(at(10))) == "its pods have not been created yet"
    assert "operator" in sentence(made, now=seconds(at(20)))
    seen = [event(made, "FailedCreatePod", QUOTA)]
    assert "operator" not in sentence(made, events=seen, now=seconds(at(20)))
    assert "operator" not in why.why(Facts(made, now=seconds(at(20)), unseen="no right"))


def test_a_lost_node_is_reported_after_the_grace_period():
    """The cause names the node and the command that removes its pod, in any state of the job."""
    leaving = pod(3, metadata={"deletionTimestamp": at(40)}, node="gptddp-worker2")
    for made in (job("Restarting"), job(suspend=True), job(deletionTimestamp=at(9))):
        told = sentence(made, [leaving])
        assert "its node gptddp-worker2 does not answer" in told
        assert "kubectl delete pod demo-worker-3 --force" in told
    assert sentence(job("Restarting"), [leaving], now=seconds(at(44))) == ""
    ready = [{"type": "Ready", "status": "True"}]
    assert sentence(job("Running"), [pod(n, conditions=ready) for n in range(4)]) == ""


def test_a_slowly_starting_pod_is_reported():
    """It is reported at once for a job that has not run yet, and otherwise after a while."""
    new = pod(3, waiting("ContainerCreating"), phase="Pending")
    told = "pod demo-worker-3: starting on node gptddp-worker"
    assert sentence(job("Created"), [new], now=seconds(at(2))) == told
    assert sentence(job("Restarting"), [new], now=seconds(at(10))) == ""
    assert sentence(job("Restarting"), [new], now=seconds(at(12))) == told
    pull = event(new, "Pulling", 'Pulling image "big"', kind="Normal")
    bound = {**pull, "reason": "Scheduled", "lastTimestamp": None}  # in the same second
    bound["eventTime"] = pull["lastTimestamp"].replace("Z", ".295800Z")
    shown = sentence(job("Restarting"), [new], [pull, bound])
    assert shown == told + ': Pulling image "big"'


def test_a_replaced_pod_is_reported_for_some_time():
    """One loss is reported for half a minute, frequent losses for minutes, exit code 0 never."""
    made, pods = job("Running"), [pod(n) for n in range(4)]
    lost = event(made, "ExitedWithCode", "Pod: a-b.demo-worker-2 exited with code 137", 5, "Normal")
    new = event(made, "SuccessfulCreatePod", "Created pod: demo-worker-2", 5, "Normal")
    new["count"], lost["count"] = 2, 40  # the operator reports one exit many times
    text = "pod demo-worker-2: exited with 137 (SIGKILL from outside, as when its node shuts down)"
    see = "; see `kubectl get events --field-selector involvedObject.name=demo-worker-2`"
    first = sentence(made, pods, [lost, new], seconds(at(20)))
    assert first == f"{text}; it was replaced{see}"
    assert sentence(made, pods, [lost, new]) == ""
    new["count"] = 8
    assert sentence(made, pods, [lost, new]) == f"{text}; it was replaced, 7 times so far{see}"
    new["count"] = 1  # not replaced: its container restarts
    assert sentence(made, pods, [lost, new], seconds(at(20))) == ""
    new["count"], lost["message"] = 2, lost["message"].replace("137", "0")
    assert sentence(made, pods, [lost, new], seconds(at(20))) == ""


def test_only_an_event_near_the_end_explains_a_kill():
    """An Evicted event explains a killed pod only if it is from around the pod's end."""
    told = event(pod(0), "Evicted", "low on memory", 20)
    killed = pod(0, terminated(137, second=30))
    assert "Evicted: low on memory" in sentence(job("Running"), [killed], [told])
    told["lastTimestamp"] = at(20, minute=9)
    assert "Evicted" not in sentence(job("Running"), [killed], [told])


WORDS = """step 40/400  loss 3.2144  lr 1.00e-03  45.2 k tok/s  4 ranks  ETA 1 min 23 s
gptddp.launch: the worker is lost (it x); it is started again in 0.5 s
gptddp.launch: rank 2: shard 00003.parquet of /data cannot be read: page checksum
    row group 7: prepare the dataset again
W1121 09:03:11.123 torch/distributed/elastic/agent: closing
"""


def test_a_failed_job_has_the_pod_the_code_and_the_reason():
    """The pod is the first with a rank's message, and not one that was only stopped."""
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


def test_a_failed_job_without_pods_is_explained_by_events():
    """One event of the operator has the exit code, another the container's message."""
    made = job("Failed")
    told = event(made, "ExitedWithCode", "Pod: default.demo-worker-3 exited with code 4")
    expected = "pod demo-worker-3: exited with 4 (no valid checkpoint)"
    assert sentence(made, [], [told]).startswith(f"{expected} (the pod and its log are gone); see")
    words = "Error pod demo-worker-3 container pytorch exitCode: 4 terminated message: step 1\n"
    words = event(made, "Error", f"{words}gptddp.launch: rank 0: all are broken\nW1121 agent")
    other = "Error pod demo-worker-1 container pytorch exitCode: 4 terminated message: another"
    other = event(made, "Error", other)
    assert sentence(made, [], [words, other, told]).startswith(
        f"{expected}: rank 0: all are broken (the"
    )
    limit = job(condition("Failed", message="it was active longer than specified deadline"))
    assert sentence(limit, [pod(0, terminated(137), phase="Failed")], [told]).startswith(
        f"it was active longer than specified deadline (spec.runPolicy); before that, {expected}"
    )


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("", ""),
        ("hello\n\n", "hello"),
        ("gptddp.launch: two\nlines \nW1121 09:03 agent\nmore\n", "two lines"),
        ("a\ngptddp.launch: the worker is lost (x)\nKilled\n", "Killed"),
        ("gptddp.launch: rank 1: no\ngptddp.launch: the worker is lost\n", "rank 1: no"),
        ("x" * 900, "x" * 497 + "..."),
    ],
)
def test_the_reason_is_found_in_the_termination_message(message, expected):
    """The reason is the rank's line, else the launcher's line, else the last line."""
    assert exit_codes.reason(message) == expected


def test_exit_codes_have_meanings():
    """Our exit codes and signals are explained; an unknown code is printed as its number."""
    assert exit_codes.meaning(3) == "3 (loss or gradient not finite)"
    assert exit_codes.meaning(139) == "139 (SIGSEGV)" and exit_codes.meaning(255) == "255"
