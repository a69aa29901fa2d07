"""If a user lacks one right in a namespace, the rest is done, and a message names what is not.

A Secret has the key of a job's rendezvous: created once, never printed, deleted with the job.
"""

import base64
import json

import pytest
from support import api_objects
from support.manifests import pod_spec
from support.writable_api_server import job, submit

WITHOUT = ("serviceaccount", "networkpolicy", "poddisruptionbudget")
PLURALS = ("serviceaccounts", "networkpolicies", "poddisruptionbudgets")
COMPANIONS = dict(zip(PLURALS, WITHOUT, strict=True))


@pytest.mark.parametrize("plural", COMPANIONS)
@pytest.mark.parametrize("verb", ["GET", "POST", "PATCH"])
def test_a_companion_that_may_not_be_created_can_be_left_out(api, k8s, verb, plural):
    """Nothing is created; the error names the option to submit, and delete, without it."""
    api.forbidden = {f"{verb} {plural}"}
    result = submit(k8s)
    option = f"--without {COMPANIONS[plural]}"
    assert result.exit_code == 1 and option in result.stderr and api.all() == []
    assert "nothing was created" in result.stderr
    assert submit(k8s, *option.split()).exit_code == 0
    assert submit(k8s, *option.split()).stdout.endswith("unchanged\n")
    assert len(api.all()) == 4 and (plural, "demo") not in api.objects
    assert k8s("delete", "demo").exit_code == 0 and api.all() == []


@pytest.mark.parametrize("refusal", [(422, "policy 'p' denied request"), (409, "it exists")])
def test_a_secret_that_cannot_be_created_stops_no_job(api, k8s, refusal):
    """A policy forbids it, or another submit was faster: the whole job is created."""
    api.refuse["Secret"] = refusal
    result = submit(k8s)
    assert result.exit_code == 0 and "run without a key" in result.stderr
    assert k8s("delete", "demo").exit_code == 0 and api.all() == []


def test_a_different_companion_that_may_not_be_changed_is_an_error(api, k8s):
    """A companion that may not be updated would stay in force with its old content."""
    submit(k8s)
    api.objects["networkpolicies", "demo"]["spec"]["ingress"] = []
    api.forbidden = {"PATCH networkpolicies"}
    result = submit(k8s)
    assert result.exit_code == 1 and "the job exists" in result.stderr


def test_without_the_right_to_read_events_the_rest_is_shown(api, k8s):
    """`status` and `logs` answer, and mention the missing right if nothing else is wrong."""
    submit(k8s)
    api.forbidden = {"GET events"}
    result = k8s("status", "demo")
    assert result.exit_code == 0 and "the reason is unknown" in result.stdout
    assert "nothing is wrong" not in result.stdout
    assert k8s("logs", "demo").exit_code == 0


def test_without_the_right_to_read_logs_there_is_one_error(api, k8s):
    """`logs` exits with 1 and one error, and not with one line per pod."""
    api.put(api_objects.job("Running"), api_objects.pod(0), api_objects.pod(1))
    path = "/api/v1/namespaces/default/pods/demo-worker-{}/log"
    for index in range(2):
        api.paths[path.format(index)] = (403, "U cannot get resource pods/log")
    result = k8s("logs", "demo")
    assert result.exit_code == 1 and result.stderr.count("cannot get resource pods/log") == 1


def theirs(data=None):
    """A Secret created with the command of `render`, or with other data."""
    key = base64.b64encode(b"0123456789abcdef" * 4).decode()
    data = {"rendezvous-key": key} if data is None else data
    return {"kind": "Secret", "metadata": {"name": "demo"}, "data": data}


def secret(api):
    return api.objects.get(("secrets", "demo"))


def test_each_job_gets_its_own_key_that_is_never_printed(api, k8s):
    """The key is in a Secret that the pods name, and neither in the job nor in any output."""
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


def test_a_key_created_by_the_user_is_not_changed(api, k8s):
    """A Secret made with the command of `render` is used unchanged, not owned and not deleted."""
    api.put(theirs())
    result = submit(k8s)
    assert result.exit_code == 0 and "warning" not in result.stderr
    assert k8s("delete", "demo").exit_code == 0
    assert secret(api)["data"] == theirs()["data"]
    assert "ownerReferences" not in secret(api)["metadata"]


@pytest.mark.parametrize(
    ("verb", "words"),
    [("GET", "U cannot do this"), ("POST", "does not exist"), ("PATCH", "U cannot do this")],
)
def test_without_rights_to_secrets_a_warning_has_the_command(api, k8s, verb, words):
    """One warning each time, with the command for another user; submit and delete continue."""
    api.forbidden = {f"{verb} secrets"}
    for _ in range(2):
        result = submit(k8s)
        (warning,) = [line for line in result.stderr.splitlines() if "warning" in line]
        assert result.exit_code == 0 and words in warning and "run without a key" in warning
        assert "kubectl create secret generic demo" in warning
    assert (secret(api) is not None) is (verb == "PATCH")
    assert k8s("delete", "demo").exit_code == 0 and api.all() == []


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"key": "eA=="}, "has no field rendezvous-key"),
        ({"rendezvous-key": ""}, "of 0 characters"),
        ({"rendezvous-key": "eA=="}, "of 1 characters"),
        ({"rendezvous-key": "%"}, "that is no text"),
    ],
)
@pytest.mark.parametrize("ours", [True, False])
def test_a_secret_without_a_usable_key_is_reported(api, k8s, data, words, ours):
    """For a new job nothing is created, and the message has the fix; an existing job gets a warning
    and no new key."""
    submit(k8s)
    labels = secret(api)["metadata"]["labels"]
    api.put(theirs(dict(data)))
    secret(api)["metadata"]["labels"] = labels if ours else {}
    result = submit(k8s)
    assert result.exit_code == 0 and secret(api)["data"] == data
    assert "warning: the Secret demo" in result.stderr and words in result.stderr
    for key in list(api.objects):
        if key[1] == "demo" and key[0] != "secrets":
            del api.objects[key]
    secret(api)["metadata"].pop("ownerReferences", None)
    del api.writes[:]
    result = submit(k8s)
    assert result.exit_code == 2 and words in result.stderr and api.writes == []
    fix = (
        "`kubectl delete secret demo -n default --kubeconfig" if ours else "`openssl rand -hex 32`"
    )
    assert fix in result.stderr and secret(api)["data"] == data


def test_a_running_job_gets_no_new_key(api, k8s):
    """Its next pod would have another key than the others: a warning, and no write."""
    submit(k8s)
    api.remove("Secret", "demo")
    del api.writes[:]
    result = submit(k8s)
    assert result.exit_code == 0 and api.writes == []
    assert "warning: the Secret demo" in result.stderr and "does not exist" in result.stderr
