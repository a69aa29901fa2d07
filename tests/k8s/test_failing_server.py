"""An API server fails one request: the error says what was done, and a repetition completes it.

Each command runs once per request that writes, and for a third of its requests that read; that
request fails, in a different way each time. `ALL_WAYS=1`: every request, in all ways.
"""

import base64
import copy
import os
import time
from pathlib import Path

import pytest
from support.manifests import render_job
from support.writable_api_server import LOST_ANSWER, NO_ANSWER, end, job, submit

from gptddp.k8s.objects import suspended
from gptddp.k8s.render import manifest

FAULTS = {  # by method; 404 to a DELETE is no failure: the object is gone
    "GET": (500, 403),
    "POST": (403, 409, NO_ANSWER, LOST_ANSWER),
    "PATCH": (403, 404, 409, NO_ANSWER, LOST_ANSWER),
    "DELETE": (403, 409, NO_ANSWER, LOST_ANSWER),
}


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between two tries
    monkeypatch.chdir(tmp_path)


def submitted(api, k8s):
    assert submit(k8s).exit_code == 0


def suspended_job(api, k8s):
    submitted(api, k8s)
    assert k8s("suspend", "demo").exit_code == 0


def failed_job(api, k8s):
    submitted(api, k8s)
    end(api, "Failed")


def own_code(api, k8s):
    Path("own").mkdir(exist_ok=True)
    Path("own/mine.py").write_text("x = 1\n")


def failed_prepare(api, k8s):
    assert k8s("prepare", "--source", "runs/texts").exit_code == 0
    failed = {"type": "Failed", "status": "True", "message": "it failed"}
    api.objects["jobs", "prepare"]["status"] = {"conditions": [failed]}


COMMANDS = {  # the preparation, the command
    "submit of a job that exists": (submitted, ["submit", "--name", "demo", "--replicas", "4"]),
    "submit": (own_code, ["submit", "--name", "demo", "--code", "own"]),
    "submit that replaces": (
        failed_job,
        ["submit", "--name", "demo", "--replicas", "4", "--replace"],
    ),
    "delete": (submitted, ["delete", "demo"]),
    "scale": (submitted, ["scale", "demo", "--replicas", "2"]),
    "suspend": (submitted, ["suspend", "demo"]),
    "resume": (suspended_job, ["resume", "demo"]),
    "prepare": (failed_prepare, ["prepare", "--source", "runs/texts"]),
}
SAYINGS = {  # how the error's second line begins: is that true for the state before and after?
    "nothing was ": lambda before, after: before == after,
    "the job was not changed": lambda before, after: before == after,
    "the job was not created": lambda before, after: not has_job(after),
    "the old job was deleted, and the new job was not created": (
        lambda before, after: has_job(before) and not has_job(after)
    ),
    "the job was created": lambda before, after: has_job(after),
    "the job exists": lambda before, after: has_job(before) and has_job(after),
    "no new Job was created": lambda before, after: True,
    "it is not known whether ": lambda before, after: True,
    "the job is deleted; it is not known whether ": lambda before, after: not has_job(after),
    "probably not deleted": lambda before, after: True,
}


def state(api):
    """All state that a command may have changed, except ids and keys."""
    found = {}
    for (plural, name), obj in api.objects.items():
        owners = [o["uid"] for o in obj["metadata"].get("ownerReferences") or []]
        found[plural, name] = {
            "owned": bool(owners) and owners == [job(api)["metadata"]["uid"]],
            "spec": copy.deepcopy(obj.get("spec")),
            "suspended": plural == "pytorchjobs" and suspended(obj),
            "key": len(base64.b64decode((obj.get("data") or {}).get("rendezvous-key", ""))),
            "status": obj.get("status"),
        }
    return found


def has_job(found):
    return ("pytorchjobs", "demo") in found


@pytest.mark.parametrize("command", COMMANDS)
def test_a_failed_request_is_reported_and_the_same_command_completes(api, command):
    """The error says correctly what was done; the second run gives the result of a run without
    failure. A failure that ends no command is a warning, or repaired by the command."""
    prepare, args = COMMANDS[command]
    prepare(api, api.command_line)
    begin = copy.deepcopy(api.objects)
    before, wanted, requests = run(api, begin, args)
    all_ways = bool(os.environ.get("ALL_WAYS"))
    for number, request in enumerate(requests):
        if request.startswith("GET") and number % 3 and not all_ways:
            continue
        ways = FAULTS[request.split()[0]]
        one = 0 if request.startswith("GET") else number % len(ways)  # a 403: see test_rights.py
        for what in ways if all_ways else [ways[one]]:
            case = f"{command}: request {number}, {request}: {what}"
            api.objects = copy.deepcopy(begin)
            api.fault, api.requests = (number, what), []
            result = api.command_line(*args)
            assert isinstance(result.exception, SystemExit | None), (case, result.exception)
            api.collect_garbage()
            after = state(api)
            if (request, what) == ("POST secrets", 409):
                assert result.exit_code == 0, (case, result.stderr)  # another was faster
            if what == 500:  # not a server that hides objects
                assert result.exit_code == 1, (case, result.stderr)
            if result.exit_code == 0:
                assert "warning" in result.stderr or after == wanted, (case, result.stderr)
            elif result.exit_code == 100:  # the job to be replaced still exists
                assert after == before, (case, result.stderr)
            else:
                second = [line[2:] for line in result.stderr.splitlines() if line[:2] == "  "]
                told = [say for say in SAYINGS if "".join(second).startswith(say)]
                assert len(told) == 1, (case, result.stderr)
                assert SAYINGS[told[0]](before, after), (case, result.stderr)
            api.fault = None
            again = api.command_line(*args)
            gone = command == "delete" and not has_job(after) and again.exit_code == 102
            assert again.exit_code == 0 or gone, (case, result.stderr, again.stderr)
            api.collect_garbage()
            assert state(api) == wanted or "warning" in result.stderr, (case, result.stderr)


def run(api, begin, args):
    """State before and after the command without failures, and the requests that it sends."""
    before, api.requests = state(api), []
    assert api.command_line(*args).exit_code == 0
    requests = list(api.requests)
    api.collect_garbage()
    return before, state(api), requests


@pytest.mark.parametrize("forbidden", [1, 2])
def test_a_missing_job_is_reported_without_further_rights(api, forbidden):
    """The exit code is 102 even if short Jobs, or jobs with similar names, may not be listed."""
    api.fault = (forbidden, 403)
    result = api.command_line("suspend", "demo")
    assert api.requests == ["GET pytorchjobs", "GET jobs", "GET pytorchjobs"]
    assert result.exit_code == 102 and "no PyTorchJob demo" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        *("status", "status --watch", "logs", "wait --timeout 0"),
        *("sample --timeout 0", "suspend", "resume", "scale --replicas 2", "delete --no-wait"),
    ],
)
def test_a_job_with_only_a_master_is_handled(api, k8s, command):
    """With our labels or without, commands work or are refused with a message."""
    for labels in (manifest.labels("demo"), {}):
        specs = copy.deepcopy(render_job({"name": "demo"})["spec"]["pytorchReplicaSpecs"])
        made = {"kind": "PyTorchJob", "metadata": {"name": "demo", "labels": labels, "uid": "u"}}
        api.put({**made, "spec": {"pytorchReplicaSpecs": {"Master": specs.pop("Worker")}}})
        verb, *options = command.split()
        result = k8s(verb, "demo", *options)
        assert result.exception is None or isinstance(result.exception, SystemExit), command
