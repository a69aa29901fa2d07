"""The Secret with the key of a job's rendezvous: made once, printed nowhere, gone with the job."""

import base64
import json

import pytest
from support.manifests import pod_spec
from support.writable_api_server import job, submit


def theirs():
    """A Secret as `render` tells to make it."""
    key = base64.b64encode(b"0123456789abcdef" * 4).decode()
    return {"kind": "Secret", "metadata": {"name": "demo"}, "data": {"rendezvous-key": key}}


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
    api.put(theirs())
    assert submit(k8s).exit_code == 0 and k8s("delete", "demo").exit_code == 0
    assert secret(api)["data"] == theirs()["data"]
    assert "ownerReferences" not in secret(api)["metadata"]


def test_a_secret_of_the_users_without_the_field_is_refused(api, k8s):
    """One of another purpose, or with a mistyped field: the pods would have no key."""
    api.put({"kind": "Secret", "metadata": {"name": "demo"}, "data": {"key": "eA=="}})
    result = submit(k8s)
    assert result.exit_code == 2 and "without the field rendezvous-key" in result.stderr
    assert ("pytorchjobs", "demo") not in api.objects


@pytest.mark.parametrize("there", [True, False])
def test_who_may_not_see_secrets_is_not_told_whether_there_is_one(api, k8s, there):
    """A warning, once, with how to know, and no error of submit or delete; an admin's stays."""
    if there:
        api.put(theirs())
    api.secrets_are_hidden = True
    result = submit(k8s)
    assert result.exit_code == 0 and "created" in result.stdout
    (warning,) = [line for line in result.stderr.splitlines() if "warning" in line]
    assert "whether the pods have a key for their rendezvous cannot be seen" in warning
    assert "`kubectl get secret demo -n default`" in warning and "docs/security.md" in warning
    assert "cannot be seen" in submit(k8s).stderr
    assert k8s("delete", "demo").exit_code == 0 and (secret(api) is not None) is there


def test_who_may_not_make_secrets_is_told_how_the_job_gets_one(api, k8s):
    """The pods have no key then, and that is sure: one warning, with the command for somebody."""
    api.forbidden = {"POST secrets"}
    result = submit(k8s)
    assert result.exit_code == 0 and secret(api) is None
    (warning,) = [line for line in result.stderr.splitlines() if "warning" in line]
    assert "the pods have no key" in warning and "kubectl create secret generic demo" in warning


def test_a_key_that_the_job_may_not_own_is_said_to_be_there(api, k8s):
    """The pods have it, but it stays when the job goes: with the command that removes it."""
    api.forbidden = {"PATCH secrets"}
    result = submit(k8s)
    assert result.exit_code == 0 and "warning: the Secret demo has the key" in result.stderr
    assert "kubectl delete secret/demo -n default" in result.stderr


def test_a_good_key_of_ours_that_may_not_be_changed_is_used(api, k8s):
    """As one that an earlier job has left, without the labels of now: no reason to refuse."""
    submit(k8s)
    api.remove("PyTorchJob", "demo")
    del secret(api)["metadata"]["labels"]["app.kubernetes.io/component"]
    api.forbidden = {"PATCH secrets"}
    result = submit(k8s)
    assert result.exit_code == 0 and "warning: the Secret demo has the key" in result.stderr


def test_delete_without_the_right_to_its_secret_deletes_all_else(api, k8s):
    """Exit code 0, and 102 the second time: what is left is named each time, with the command."""
    submit(k8s)
    del secret(api)["metadata"]["ownerReferences"]
    api.forbidden = {"DELETE secrets"}
    for code in (0, 102):
        result = k8s("delete", "demo")
        assert result.exit_code == code and api.all() == [("Secret", "demo")]
        assert "kubectl delete secret/demo -n default" in result.stderr
        assert "secret" not in result.stdout
    api.forbidden = set()
    assert k8s("delete", "demo").exit_code == 0 and api.all() == []


def test_a_secret_that_goes_with_the_job_is_not_said_to_be_left(api, k8s):
    """The garbage collector deletes it, whoever deletes the job."""
    submit(k8s)
    api.forbidden = {"DELETE secrets"}
    result = k8s("delete", "demo")
    api.collect_garbage()
    assert result.exit_code == 0 and "kubectl" not in result.stderr and api.all() == []


def test_a_short_job_that_may_not_be_deleted_is_an_error(api, k8s):
    """It runs on: all else is deleted, and the exit code is 1."""
    submit(k8s)
    batch = {"kind": "Job", "metadata": {"name": "demo", "labels": job(api)["metadata"]["labels"]}}
    api.put(batch)
    api.forbidden = {"DELETE jobs"}
    result = k8s("delete", "demo")
    assert (
        result.exit_code == 1 and "not deleted, as far as is known: job.batch/demo" in result.stderr
    )
    api.forbidden = set()
    assert k8s("delete", "demo").exit_code == 0 and api.all() == []


UNUSABLE = [{}, {"rendezvous-key": ""}, {"rendezvous-key": "eA=="}, {"rendezvous-key": "%"}]


@pytest.mark.parametrize("data", UNUSABLE, ids=["missing", "empty", "short", "no base64"])
def test_a_secret_without_a_usable_key_is_never_used_in_silence(api, k8s, data):
    """Ours is renewed before a job is made of it, theirs is refused and stays; a job that exists
    gets no new key, but a warning."""
    submit(k8s)
    secret(api)["data"] = dict(data)
    result = submit(k8s)
    assert result.exit_code == 0 and secret(api)["data"] == data
    assert "warning: the Secret demo is with" in result.stderr
    api.remove("PyTorchJob", "demo")
    result = submit(k8s)
    assert result.exit_code == 0 and "it has a new key" in result.stderr
    assert len(base64.b64decode(secret(api)["data"]["rendezvous-key"])) == 64
    k8s("delete", "demo")
    api.put({**theirs(), "data": dict(data)})
    result = submit(k8s)
    assert result.exit_code == 2 and "rendezvous-key" in result.stderr
    assert secret(api)["data"] == data and ("pytorchjobs", "demo") not in api.objects


def test_a_bad_key_of_ours_that_may_not_be_renewed_is_refused(api, k8s):
    """The pods would end at once, or run without a key: exit code 2, and the command."""
    submit(k8s)
    api.remove("PyTorchJob", "demo")
    secret(api)["data"] = {"rendezvous-key": "eA=="}
    api.forbidden = {"PATCH secrets"}
    result = submit(k8s)
    assert result.exit_code == 2 and "kubectl delete secret/demo -n default" in result.stderr
    assert ("pytorchjobs", "demo") not in api.objects


def test_a_job_that_runs_gets_no_new_key(api, k8s):
    """Its next pod would have another key than the others: a warning, and not one write."""
    submit(k8s)
    api.remove("Secret", "demo")
    del api.writes[:]
    result = submit(k8s)
    assert result.exit_code == 0 and api.writes == []
    assert "warning: there is no Secret demo" in result.stderr
