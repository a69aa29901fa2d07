"""A job for a queue of Kueue: what is rendered, and the rules of it for manifests from any hand."""

import pytest
from support.manifests import render, render_job, worker

from gptddp.k8s.render import admission

QUEUE, PRIORITY = "kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class"
LABELS, ON_PODS = ("metadata", "labels"), ("template", "metadata", "labels")
ANNOTATIONS = ("template", "metadata", "annotations")
TOPOLOGY = "kueue.x-k8s.io/podset-{}-topology"


def test_the_queue_is_a_label_of_the_job_alone():
    """Kueue takes what has it: on the pods it would queue each for itself. Nothing is suspended
    here: Kueue does that, and a manifest that is applied again must not undo an admission."""
    *companions, job = render({"queue": "team", "priority": "high"})
    assert job["metadata"]["labels"].items() >= {QUEUE: "team", PRIORITY: "high"}.items()
    assert "suspend" not in job["spec"]["runPolicy"]
    for other in (worker(job)["template"], *companions):
        assert not {QUEUE, PRIORITY} & set(other["metadata"]["labels"])
    assert admission.check_job(job) == []


@pytest.mark.parametrize(
    ("wish", "kind", "value"),
    [
        ("required=example.com/rack", "required", "example.com/rack"),
        ("preferred=kubernetes.io/hostname", "preferred", "kubernetes.io/hostname"),
        ("unconstrained", "unconstrained", "true"),
    ],
)
def test_the_topology_is_an_annotation_of_the_pods(wish, kind, value):
    """Beside those that the pods have anyway."""
    job = render_job({"queue": "team", "topology": wish})
    found = worker(job)["template"]["metadata"]["annotations"]
    assert found[TOPOLOGY.format(kind)] == value and "prometheus.io/port" in found
    assert admission.check_job(job) == []


def put(job, path, key, value):
    """Set a label, an annotation or a field of the job, or of its workers' entry."""
    at = job if path[0] in ("metadata", "spec") else worker(job)
    for name in path:
        at = at.setdefault(name, {})
    at[key] = value


@pytest.mark.parametrize(
    ("id", "changes", "words"),
    [
        ("queue", [(LABELS, QUEUE, "")], "use --queue"),
        ("queue", [(LABELS, QUEUE, "Team_A")], "'Team_A' is not the name of an object"),
        ("queue", [(LABELS, QUEUE, "a" * 64)], "up to 63"),
        ("queue", [(LABELS, PRIORITY, "a/b")], "use --priority"),
        ("queue", [(ON_PODS, QUEUE, "team")], "move it to metadata.labels"),
        (
            "queue-size",
            [(("metadata", "annotations"), "kueue.x-k8s.io/elastic-job", "true")],
            "no PyTorchJob",
        ),
        (
            "queue-size",
            [(LABELS, QUEUE, "team"), (("spec", "elasticPolicy"), "metrics", [{"type": "Pods"}])],
            "stops the job each time",
        ),
        ("queue-time", [(LABELS, "kueue.x-k8s.io/max-exec-time-seconds", "1h")], "use 1 or more"),
        ("queue-time", [(LABELS, "kueue.x-k8s.io/max-exec-time-seconds", "0")], "use 1 or more"),
        (
            "queue-topology",
            [(ANNOTATIONS, TOPOLOGY.format("required"), "a rack")],
            "not the key of a label",
        ),
        (
            "queue-topology",
            [(ANNOTATIONS, TOPOLOGY.format("unconstrained"), "yes")],
            "neither true nor false",
        ),
        (
            "queue-topology",
            [
                (ANNOTATIONS, TOPOLOGY.format("required"), "rack"),
                (ANNOTATIONS, TOPOLOGY.format("preferred"), "rack"),
            ],
            "leave the others out",
        ),
    ],
)
def test_a_broken_rule_of_queues_names_field_rule_and_fix(id, changes, words):
    """Under the rule's id; what is right around it has no complaint."""
    job = render_job()
    for change in changes:
        put(job, *change)
    problem, *others = admission.check_job(job)
    assert {it.id for it in others} <= {"pod-labels"}  # what no label may be
    assert problem.id == id and words in str(problem)
    assert problem.field.split("[")[0].split(".")[0] in ("metadata", "spec")


def test_what_kueue_takes_has_no_complaint():
    """A time limit, a queue of 63 characters, an autoscaler without a queue."""
    job = render_job({"queue": "a" * 63})
    put(job, LABELS, "kueue.x-k8s.io/max-exec-time-seconds", "3600")
    assert admission.check_job(job) == []
    job = render_job()
    put(job, ("spec", "elasticPolicy"), "metrics", [{"type": "Pods"}])
    assert admission.check_job(job) == []
