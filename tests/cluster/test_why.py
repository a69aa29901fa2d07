"""Jobs that do not run, on a real cluster: `why` names the cause, and its command is run.

All broken jobs are made together in one namespace, so that they break at the same time.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.broken_jobs import CASES, NEEDED, Case, device, requests
from support.cluster_jobs import until
from support.small_jobs import SLEEP, job

from gptddp.k8s import exit_codes
from gptddp.k8s.act import giving_up
from gptddp.k8s.cluster import Cluster, connect
from gptddp.k8s.observe import container_causes, facts, job_causes, progress, why
from gptddp.k8s.observe.cause import Cause
from gptddp.k8s.observe.known_causes import KNOWN
from gptddp.k8s.observe.wait import until_done

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
        return next(iter(why.causes(progress.with_log(self.cluster, found))), None)

    def becomes(self, name: str, cause: str, *words: str, limit_s: float = LIMIT_S) -> Cause:
        """Wait until the first cause of a job is this one; its sentence has these words."""
        seen = []

        def found() -> Cause | None:
            seen[:] = [self.cause(name)]
            right = seen[0] and seen[0].id == cause
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
    """All broken jobs, made at once; a minute is what each second is told after here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job_causes, "NO_STEP_S", 5.0)
        patch.setattr(container_causes, "PULL_S", 1.0)
        made = new_namespace()
        try:
            made.kubectl("create", "-f", "-", stdin=NEEDED)
            made.kubectl("create", "-f", "-", stdin=[case.job for case in CASES])
            yield Asked(made)
        finally:
            made.remove()


@pytest.mark.parametrize("case", CASES, ids=[case.cause for case in CASES])
def test_the_line_names_object_and_field_and_its_command_works(asked, case: Case):
    """The command is run as it stands in the line: it shows the cause, or the job runs after it."""
    found = asked.becomes(case.name, case.cause, *case.words)
    assert f"`{found.command}`" in found.sentence
    printed = asked.shell(found.command)
    if "unable to retrieve container logs" in printed:  # the kubelet has just deleted them
        until(lambda: case.shown in asked.shell(found.command), "the next log is there", LIMIT_S)
    else:
        assert case.shown in printed, f"{found.command}: {printed}"
    if KNOWN[case.cause].mends:
        until(lambda: gone(asked.cause(case.name), case.cause), "it is mended", LIMIT_S)


def gone(found: Cause | None, cause: str) -> bool:
    return found is None or found.id != cause


# -- what has to be done to a job that runs -------------------------------------------------------


def runs(asked: Asked, made: dict[str, Any]) -> str:
    """Create a job of one pod, and wait until it runs; its pod's name."""
    asked.namespace.kubectl("create", "-f", "-", stdin=made)
    pod = f"{made['metadata']['name']}-worker-0"
    asked.namespace.kubectl("wait", f"pod/{pod}", "--for=create", "--timeout=60s")
    asked.namespace.kubectl("wait", f"pod/{pod}", "--for=condition=Ready", "--timeout=90s")
    return pod


def test_a_pod_that_is_evicted_as_by_a_drain(asked):
    """It is told while the pod has its grace period."""
    pod = runs(asked, job("drained", SLEEP, pod={"terminationGracePeriodSeconds": 60}))
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    path = f"/api/v1/namespaces/{asked.namespace.namespace}/pods/{pod}/eviction"
    asked.namespace.kubectl("create", "--raw", path, "-f", "-", stdin=eviction)
    found = asked.becomes("drained", "drained", pod, "evicted through the API", limit_s=45)
    assert "Ready" in asked.shell(found.command)


def test_a_command_that_is_not_there_is_tried_in_vain(asked):
    """With our restartPolicy the pod is made again and again; the command of the line stops it."""
    made = job("again", SLEEP, command=["pythn"])
    asked.namespace.kubectl("create", "-f", "-", stdin=made)
    found = asked.becomes("again", "in-vain", "again-worker-0", "never started", "pythn")
    asked.shell(found.command)
    asked.becomes("again", "suspended")


@pytest.fixture
def slot(asked) -> Iterator[Callable[[str], dict[str, Any]]]:
    """A device that one node has one of, and priorities: slot(priority) -> a job's options."""
    namespace, node = asked.namespace, asked.namespace.workers()[0]
    name = namespace.namespace
    resource = f"example.com/{name}"
    path = f"/status/capacity/{resource.replace('/', '~1')}"

    def patch(op: str) -> None:
        change = f'[{{"op": "{op}", "path": "{path}", "value": "1"}}]'
        namespace.kubectl(
            "patch", "node", node, "--subresource=status", "--type=json", "-p", change
        )

    patch("add")
    classes = {f"{name}-low": 1, f"{name}-high": 1000}
    head = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass"}
    for key, value in classes.items():
        namespace.kubectl(
            "create", "-f", "-", stdin={**head, "metadata": {"name": key}, "value": value}
        )
    until(lambda: resource in namespace.get("node", node)["status"]["allocatable"], resource, 60)
    yield lambda priority: {
        "pod": {"priorityClassName": f"{name}-{priority}"},
        "resources": device(resource),
    }
    namespace.kubectl("delete", "pytorchjobs", "low", "high", "--ignore-not-found")
    namespace.kubectl("delete", "priorityclasses", *classes)
    patch("remove")


def test_a_pod_that_is_preempted(asked, slot):
    """Its place is taken by a pod of a higher priority, and the next one finds none."""
    runs(asked, job("low", SLEEP, **slot("low")))
    asked.namespace.kubectl("create", "-f", "-", stdin=job("high", SLEEP, **slot("high")))
    found = asked.becomes("low", "preempted", "low-worker-0", "spec.priorityClassName", "no node")
    assert f"{asked.namespace.namespace}-high" in asked.shell(found.command)


def rejected(asked: Asked, name: str) -> None:
    """Create a job whose pod a kubelet rejects: the scheduler, which knows, is not asked."""
    node = asked.namespace.workers()[0]
    made = job(name, SLEEP, pod={"nodeName": node}, resources=requests(cpu="500"))
    labels = {"app.kubernetes.io/instance": name, "app.kubernetes.io/managed-by": "gptddp-k8s"}
    made["metadata"]["labels"] |= labels
    asked.namespace.kubectl("create", "-f", "-", stdin=made)


def test_a_node_that_rejects_its_pods(asked):
    """Told with the kubelet's own reason; the command of the line stops it."""
    rejected(asked, "rejected")
    found = asked.becomes("rejected", "in-vain", "rejected-worker-0", "OutOfcpu")
    asked.shell(found.command)
    asked.becomes("rejected", "suspended")


def test_a_wait_bounds_what_is_in_vain(asked, monkeypatch):
    """The operator itself fails the job, whose pods are gone then; the reason is in `status`."""
    monkeypatch.setattr(giving_up, "LEAST_S", 5.0)
    rejected(asked, "vain")
    said: list[str] = []
    look = giving_up.GivingUp(asked.cluster, said.append)
    assert until_done(asked.cluster, "vain", said.append, LIMIT_S, look) == exit_codes.FAILED, said
    found = asked.becomes("vain", "given-up", "vain-worker-0 was made ", "OutOfcpu", "delete vain")
    printed = asked.shell(found.command)
    assert "OutOfcpu" in printed and "Type:" in printed and "Failed" in printed
    selector = "training.kubeflow.org/job-name=vain"
    until(lambda: not asked.namespace.get("pods", "-l", selector), "no pod is left", 30)


def test_a_sandbox_that_cannot_be_made(asked):
    """As without an address: here the runtime has no such handler."""
    namespace = asked.namespace
    head = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass"}
    name = namespace.namespace
    namespace.kubectl(
        "create", "-f", "-", stdin={**head, "metadata": {"name": name}, "handler": "none"}
    )
    try:
        made = job("sandbox", SLEEP, pod={"runtimeClassName": name})
        namespace.kubectl("create", "-f", "-", stdin=made)
        found = asked.becomes("sandbox", "sandbox", "sandbox-worker-0", "its node")
        assert "FailedCreatePodSandBox" in asked.shell(found.command)
    finally:
        namespace.kubectl("delete", "runtimeclass", name)


def test_an_image_that_comes_slowly(asked):
    """From a registry that accepts, and then says nothing: a pull, and no failure yet."""
    if not asked.namespace.kind:
        pytest.skip("the registry is a socket of this machine, which the nodes of kind reach")
    command = [
        "docker",
        "network",
        "inspect",
        "kind",
        "-f",
        "{{range .IPAM.Config}}{{.Gateway}} {{end}}",
    ]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    address = next(word for word in told if "." in word)
    with socket.create_server((address, 0)) as registry:
        image = f"{address}:{registry.getsockname()[1]}/slow:1"
        asked.namespace.kubectl("create", "-f", "-", stdin=job("slow", SLEEP, image=image))
        found = asked.becomes("slow", "pulling", image, "slow-worker-0")
        assert "Pulling" in asked.shell(found.command)
        time.sleep(0.1)
