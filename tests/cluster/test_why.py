"""Jobs that do not run, on a real cluster: `why` names the cause, and its command is run.

All broken jobs are made together in one namespace, so that they break at the same time.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.broken_jobs import CASES, NEEDED, Case, ours
from support.small_jobs import SLEEP, job
from support.waiting import until

from gptddp.k8s.cluster import Cluster, connect
from gptddp.k8s.observe import facts, job_causes, rank_0_log, why
from gptddp.k8s.observe.cause import MENDS, Cause

ROOT = Path(__file__).parents[2]
LIMIT_S = 120.0  # for a cause to show: the kubelet measures volumes once a minute


class Asked:
    """The cluster as `status` asks it, and a shell in which the command of a cause is run."""

    def __init__(self, namespace: Any) -> None:
        self.namespace = namespace
        self.cluster: Cluster = connect(namespace.namespace, namespace.kubeconfig)

    def cause(self, name: str) -> Cause | None:
        """The first cause of a job."""
        found = facts.fetch(self.cluster, name)
        assert found is not None
        return next(iter(why.causes(rank_0_log.with_log(self.cluster, found))), None)

    def becomes(self, name: str, cause: str, *words: str, limit_s: float = LIMIT_S) -> Cause:
        """Wait until the first cause of a job is this one; its sentence has these words."""
        seen = []

        def found() -> Cause | None:
            seen[:] = [self.cause(name)]
            right = seen[0] and seen[0].id in cause.split(" or ")
            return seen[0] if right and all(word in seen[0].sentence for word in words) else None

        try:
            return until(found, f"{name}: {cause}", limit_s, poll_s=0.3)
        except AssertionError as error:
            raise AssertionError(f"{error}: {seen[0] and seen[0].sentence}") from None

    def shell(self, command: str) -> str:
        """What a command prints, as it would be pasted; it must succeed."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, shell=True, text=True, capture_output=True, env=env, timeout=120
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def asked(new_namespace) -> Iterator[Asked]:
    """All broken jobs, made at once, with limits of seconds instead of minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_causes, "NO_STEP_S", 5.0)
        patch.setattr(job_causes, "JOIN_S", 3.0)
        made = new_namespace()
        try:
            made.kubectl("create", "-f", "-", stdin=NEEDED)
            made.kubectl("create", "-f", "-", stdin=[case.job for case in CASES])
            yield Asked(made)
        finally:
            made.remove()


@pytest.mark.parametrize("case", CASES, ids=[f"{it.cause}-{it.name[:9]}" for it in CASES])
def test_the_line_names_object_and_field_and_its_command_works(asked, case: Case):
    """The command is run as it stands in the line: it shows the cause, or the job runs after it."""
    found = asked.becomes(case.name, case.cause, *case.words)
    if not found.command:  # a cause without a command: nothing is wrong yet
        return
    assert f"`{found.command}`" in found.sentence
    printed = asked.shell(found.command)
    if "unable to retrieve container logs" in printed:  # the kubelet has just deleted them
        until(lambda: case.shown in asked.shell(found.command), "the next log is there", LIMIT_S)
    else:
        assert case.shown in printed, f"{found.command}: {printed}"
    if found.id in MENDS:
        until(lambda: gone(asked.cause(case.name), case.cause), "it is mended", LIMIT_S)


def gone(found: Cause | None, cause: str) -> bool:
    return found is None or found.id != cause


# -- causes of jobs that run ----------------------------------------------------------------------


def runs(asked: Asked, made: dict[str, Any]) -> str:
    """Create a job of one pod, and wait until it runs; its pod's name."""
    asked.namespace.kubectl("create", "-f", "-", stdin=made)
    pod = f"{made['metadata']['name']}-worker-0"
    asked.namespace.kubectl("wait", f"pod/{pod}", "--for=create", "--timeout=60s")
    asked.namespace.kubectl("wait", f"pod/{pod}", "--for=condition=Ready", "--timeout=90s")
    return pod


def test_an_evicted_pod_is_named(asked):
    """`why` names the pod during its grace period, and quotes its condition."""
    pod = runs(asked, job("drained", SLEEP, pod={"terminationGracePeriodSeconds": 60}))
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    path = f"/api/v1/namespaces/{asked.namespace.namespace}/pods/{pod}/eviction"
    asked.namespace.kubectl("create", "--raw", path, "-f", "-", stdin=eviction)
    found = asked.becomes("drained", "drained", pod, "EvictionByEvictionAPI: ", limit_s=45)
    assert pod in asked.shell(found.command)


def test_a_missing_command_is_tried_in_vain(asked):
    """With our restartPolicy the pod is made again and again; the shown command suspends it."""
    made = ours(job("again", SLEEP, command=["pythn"]))
    asked.namespace.kubectl("create", "-f", "-", stdin=made)
    found = asked.becomes("again", "in-vain", "again-worker-0", "never started", "pythn")
    asked.shell(found.command)
    asked.becomes("again", "suspended")
