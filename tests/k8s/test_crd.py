"""The structure of a PyTorchJob: the types of the operator's CRD, a message for each mistake."""

import json

import pytest
from support import crd_types, odd_jobs
from support.manifests import SPECS, render_job
from support.paths import ROOT

from gptddp.k8s.render import crd, documents


def test_the_table_is_what_the_script_makes_of_the_pinned_module():
    """The committed types are those of the CRD of the operator that the tests install."""
    path = crd_types.crd_path()
    if path is None:
        pytest.skip(f"no module {crd_types.MODULE}: tests/cluster/modules/binaries builds it")
    assert crd_types.TABLE.read_text() == crd_types.table(crd_types.load(path))


def test_the_script_refuses_a_keyword_that_the_table_would_lose():
    """A rule of a later CRD is not dropped in silence."""
    node = {"type": "integer", "minimum": 1}
    schema = {"type": "object", "properties": {"spec": node}}
    crd_of = {"spec": {"versions": [{"schema": {"openAPIV3Schema": schema}}]}}
    with pytest.raises(ValueError, match="minimum"):
        crd_types.table(crd_of)


def test_the_table_is_small():
    """A few kilobytes, and a line a type for the reader of a diff."""
    assert crd_types.TABLE.stat().st_size < 15_000
    assert len(json.loads(crd_types.TABLE.read_text())) > 100


@pytest.mark.parametrize("name", SPECS)
def test_rendered_jobs_have_the_structure(name):
    """Nothing that `render` prints is unknown to the API server."""
    assert crd.check(render_job(*SPECS[name])) == []


@pytest.mark.parametrize(("path", "value", "words"), odd_jobs.REFUSED)
def test_a_wrong_field_is_named_with_what_to_do(path, value, words):
    """One problem, with the field's path, and the spelling, the place or the type that is right."""
    (problem,) = crd.check(odd_jobs.with_field(path, value))
    assert words in str(problem)
    assert problem.field.startswith(path.split(".")[0]) and problem.rule and problem.fix


@pytest.mark.parametrize(("path", "value"), odd_jobs.ALLOWED)
def test_what_the_server_takes_is_taken(path, value):
    """A null, a quantity as a number, an empty list: no problem."""
    assert crd.check(odd_jobs.with_field(path, value)) == []


def test_the_operators_own_examples_have_the_structure():
    """The PyTorchJobs that the project kustomizes or shows are known in every field."""
    for path in sorted((ROOT / "k8s/jobs").glob("*.yaml")):
        (job,) = [
            document.value
            for document in documents.parse(path.read_text(), path.name)
            if document.value["kind"] == "PyTorchJob"
        ]
        assert crd.check(job) == []
