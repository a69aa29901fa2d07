"""The Jobs of `prepare` and `sample`, and their pods."""

import yaml
from click.testing import CliRunner
from support.api_server import Log
from support.writable_api_server import WriteAPI, put_claims

from gptddp.k8s.cli.main import cli


def dry_run(*args):
    """The Job that `prepare` with these options would create."""
    result = CliRunner().invoke(cli, ["prepare", "--dry-run", *args])
    assert result.exit_code == 0, result.output
    return yaml.safe_load(result.stdout)


def pod_of(job):
    """The spec of its pods."""
    return job["spec"]["template"]["spec"]


def server_with_texts(folder):
    """A server with the claims of the dataset, the runs and texts."""
    server = WriteAPI(folder)
    put_claims(server, "texts")
    return server


def run_pods(api, message="", log=(), **state):
    """Give every new Job a pod that has ended with this state, and end the Job with it."""

    def ended(body):
        name = body["metadata"]["name"]
        code = state.get("exitCode", 0)
        terminated = {"terminated": {"exitCode": code, "message": message, **state}}
        phase = "Pending" if "state" in state else "Failed" if code else "Succeeded"
        container = {"name": "c", "image": "i", "state": state.get("state", terminated)}
        api.put(
            {
                "kind": "Pod",
                "metadata": {
                    "name": f"{name}-pod",
                    "creationTimestamp": "2026-11-21T09:00:00Z",
                    "labels": {"batch.kubernetes.io/job-name": name},
                },
                "spec": {
                    "volumes": [{"name": "c", "persistentVolumeClaim": {"claimName": "texts"}}]
                },
                "status": {
                    "phase": phase,
                    "containerStatuses": [container],
                    **state.get("status", {}),
                },
            }
        )
        api.logs[f"{name}-pod"] = Log([("2026-11-21T09:00:00.000000001Z", line) for line in log])
        if not state.get("state") and not state.get("status"):
            kind = "Failed" if code else "Complete"
            body["status"] = {"conditions": [{"type": kind, "status": "True"}]}

    api.created["Job"] = ended
