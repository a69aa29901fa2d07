"""The Secret with the key of a job's rendezvous: made once, printed nowhere, gone with the job."""

import copy
import json

import pytest
from support.manifests import pod_spec
from support.writable_api_server import WriteAPI, job, put_claims, submit


@pytest.fixture
def api(tmp_path):
    server = WriteAPI(tmp_path)
    put_claims(server)
    yield server
    server.close()


@pytest.fixture
def k8s(api):
    """Run `gptddp-k8s` against the server."""
    return api.command_line


def secret(api):
    return api.objects.get(("secrets", "demo"))


def test_each_job_gets_a_key_of_its_own_that_nobody_prints(api, k8s):
    """In a Secret that the pods name, and neither in the job nor in any output."""
    result = submit(k8s)
    key = secret(api)["stringData"]["rendezvous-key"]
    assert len(key) == 64 and secret(api)["type"] == "Opaque"
    (variable,) = [e for e in pod_spec(job(api))["containers"][0]["env"] if "RENDEZ" in e["name"]]
    source = {"name": "demo", "key": "rendezvous-key", "optional": True}
    assert variable["valueFrom"] == {"secretKeyRef": source}
    assert key not in json.dumps(job(api)) + result.output
    submit(k8s)
    assert secret(api)["stringData"]["rendezvous-key"] == key
    assert key not in k8s("delete", "demo").output and secret(api) is None
    submit(k8s)
    assert secret(api)["stringData"]["rendezvous-key"] != key


def test_a_key_that_the_user_has_made_stays_the_users(api, k8s):
    """As `render` tells to make it: used as it is, without an owner, and not deleted."""
    theirs = {"kind": "Secret", "metadata": {"name": "demo"}, "data": {"rendezvous-key": "eA=="}}
    api.put(copy.deepcopy(theirs))
    assert submit(k8s).exit_code == 0 and k8s("delete", "demo").exit_code == 0
    assert secret(api)["data"] == theirs["data"]
    assert "ownerReferences" not in secret(api)["metadata"]


def test_a_secret_of_the_users_without_the_field_is_refused(api, k8s):
    """One of another purpose, or with a mistyped field: the pods would have no key."""
    api.put({"kind": "Secret", "metadata": {"name": "demo"}, "data": {"key": "eA=="}})
    result = submit(k8s)
    assert result.exit_code == 2 and "without the field rendezvous-key" in result.stderr
    assert ("pytorchjobs", "demo") not in api.objects


def test_without_the_right_to_secrets_the_job_runs_without_a_key(api, k8s):
    """A warning, and no error of submit or delete."""
    api.secrets_are_hidden = True
    result = submit(k8s)
    assert result.exit_code == 0 and "created" in result.stdout
    assert "warning: the pods have no key for their rendezvous" in result.stderr
    assert "docs/security.md" in result.stderr
    assert k8s("delete", "demo").exit_code == 0


def test_a_job_that_runs_gets_no_new_key(api, k8s):
    """Its next pod would have another key than the others: a warning, and not one write."""
    submit(k8s)
    api.remove("Secret", "demo")
    del api.writes[:]
    result = submit(k8s)
    assert result.exit_code == 0 and api.writes == []
    assert "warning: there is no Secret demo" in result.stderr
