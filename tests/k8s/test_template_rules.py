"""What pods are refused for, and the job that they are made from is not."""

import pytest
from support import odd_jobs
from support.manifests import SPECS, render_job

from gptddp.k8s.render import admission, validate


@pytest.mark.parametrize(("path", "value", "words"), odd_jobs.PODS_REFUSED)
def test_what_no_pod_may_have_is_found_in_its_job(path, value, words):
    """One problem, or one for each place, with field and fix."""
    found = validate.check(odd_jobs.with_field(path, value))
    assert found and any(words in str(problem) for problem in found)
    assert all(problem.id.startswith("pod-") and problem.fix for problem in found)
    assert all(problem.field.startswith("spec.pytorchReplicaSpecs.Worker.") for problem in found)


@pytest.mark.parametrize(("path", "value"), odd_jobs.PODS_ALLOWED)
def test_what_a_pod_may_have_is_no_problem(path, value):
    """Nobody is kept from what the API takes."""
    job = odd_jobs.with_field(path, value)
    if "requests" in path or path.endswith("resources"):
        job = odd_jobs.with_field(path, value)
    assert validate.check(job) == []


@pytest.mark.parametrize("image", ["FOO/bar:1", "http://x/y:1", "a b", "x:"])
def test_an_image_that_no_node_can_pull_is_found(image):
    """The API takes any word; the kubelet does not."""
    (problem,) = validate.check(odd_jobs.with_field(f"{odd_jobs.CONTAINER}.image", image))
    assert problem.id == "pod-choices" and problem.field.endswith("containers[0].image")


@pytest.mark.parametrize(
    "path",
    [
        f"{odd_jobs.WORKER}.template",
        f"{odd_jobs.WORKER}.template.spec",
        f"{odd_jobs.POD}.containers",
        odd_jobs.WORKER,
    ],
)
def test_a_job_without_pods_is_told_what_is_missing(path):
    """A name of the field, and not one of Python's errors."""
    job = odd_jobs.with_field(path, None)
    found = validate.check(job)
    assert [p.id for p in found] == ["missing-field"]
    assert found[0].field in (
        f"{odd_jobs.POD}.containers",
        f"{odd_jobs.WORKER}.template.spec.containers",
    )


@pytest.mark.parametrize("name", SPECS)
def test_rendered_pods_have_no_problem(name):
    """None of the rules speaks of what `render` prints."""
    assert admission.check_job(render_job(*SPECS[name])) == []
