"""Helpers for tests of local jobs: jobs of Python code, and readers of the files they leave."""

import json

from support.manifests import container, pod_spec, render_job

RUN = """
import sys, yaml
from pathlib import Path
from gptddp.errors import GptddpError
from gptddp.k8s.local.run import run
try:
    objects = list(yaml.safe_load_all(open(sys.argv[1])))
    sys.exit(run(objects, local_dir=Path(sys.argv[2]), verbose="-v" in sys.argv))
except GptddpError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""
# The beginning of each pod's code. A pod sees its name, and /runs, which all pods share.
PRELUDE = """
import json, os, pathlib, signal, subprocess, sys, time
name, runs = os.environ["POD_NAME"], pathlib.Path("/runs")
first = name.endswith("-0")
def once(what):
    try:
        os.close(os.open(runs / what, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
def wait(what):
    while not (runs / what).exists():
        time.sleep(0.02)
"""


def job(code="", *, replicas=2, grace_s=5, name="job"):
    """A rendered PyTorchJob whose container runs Python code."""
    built = render_job({"replicas": replicas, "name": name})
    pod_spec(built)["terminationGracePeriodSeconds"] = grace_s
    container(built)["command"], container(built)["args"] = ["python", "-c", PRELUDE + code], []
    return built


def status(folder, name="job"):
    return json.loads((folder / "local" / "jobs" / name / "status.json").read_text())


def kinds(value):
    """The conditions that are True, oldest first."""
    return [c["type"] for c in value["conditions"] if c["status"] == "True"]


def pod_file(folder, name):
    """A file that a pod wrote into the volume `runs`."""
    return folder / "local" / "volumes" / "runs" / name
