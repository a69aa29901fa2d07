"""Jobs that do not run, on a real cluster: `why` names the cause, and its command is run.

All broken jobs are made together in one namespace, so that they break at the same time.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.broken_jobs import CASES, NEEDED, Case, device, ours, requests
from support.small_jobs import SLEEP, job
from support.waiting import until

from gptddp import __version__
from gptddp.k8s.cluster import Cluster, connect
from gptddp.k8s.observe import facts, job_causes, progress, why
from gptddp.k8s.observe.cause import Cause
from gptddp.k8s.observe.known_causes import KNOWN

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
    """All broken jobs, made at once; a minute is what each second is told after here."""
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
    if not found.command:  # nothing is wrong yet
        return
    assert f"`{found.command}`" in found.sentence
    printed = asked.shell(found.command)
    if "unable to retrieve container logs" in printed:  # the kubelet has just deleted them
        until(lambda: case.shown in asked.shell(found.command), "the next log is there", LIMIT_S)
    else:
        assert case.shown in printed, f"{found.command}: {printed}"
    if KNOWN[found.id].mends:
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
    """It is told while the pod has its grace period, in the words of its condition."""
    pod = runs(asked, job("drained", SLEEP, pod={"terminationGracePeriodSeconds": 60}))
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod}}
    path = f"/api/v1/namespaces/{asked.namespace.namespace}/pods/{pod}/eviction"
    asked.namespace.kubectl("create", "--raw", path, "-f", "-", stdin=eviction)
    found = asked.becomes("drained", "drained", pod, "EvictionByEvictionAPI: ", limit_s=45)
    assert pod in asked.shell(found.command)


def test_a_pod_whose_node_does_not_answer(asked):
    """It has the name of a node that does not exist, so that nobody reports its end."""
    made = job("lost", SLEEP, pod={"nodeName": "none-such"})
    asked.namespace.kubectl("create", "-f", "-", stdin=made)
    asked.namespace.kubectl("wait", "pod/lost-worker-0", "--for=create", "--timeout=60s")
    asked.namespace.kubectl("delete", "pod", "lost-worker-0", "--wait=false")
    words = ("its node none-such does not answer", "kubectl delete pod lost-worker-0 --force")
    found = asked.becomes("lost", "node-lost", *words, limit_s=45)
    assert asked.namespace.workers()[0] in asked.shell(found.command)


def test_a_job_that_a_finalizer_keeps(asked):
    """Until somebody takes it off."""
    made = job("leaving", SLEEP, suspend=True)
    made["metadata"]["finalizers"] = ["example.com/hold"]
    asked.namespace.kubectl("create", "-f", "-", stdin=made)
    asked.namespace.kubectl("delete", "pytorchjob", "leaving", "--wait=false")
    try:
        found = asked.becomes("leaving", "deleting", "finalizers hold it: example.com/hold")
        assert "example.com/hold" in asked.shell(found.command)
    finally:
        patch = '{"metadata": {"finalizers": null}}'
        asked.namespace.kubectl("patch", "pytorchjob", "leaving", "--type=merge", "-p", patch)


def test_a_command_that_is_not_there_is_tried_in_vain(asked):
    """With our restartPolicy the pod is made again and again; the command of the line stops it."""
    made = ours(job("again", SLEEP, command=["pythn"]))
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
    """Its place is taken by a pod of a higher priority, and the next one finds no room."""
    low, high = job("low", SLEEP, **slot("low")), job("high", SLEEP, **slot("high"))
    runs(asked, low)
    asked.namespace.kubectl("create", "-f", "-", stdin=high)
    asked.becomes("low", "drained", "low-worker-0", "PreemptionByScheduler: ", limit_s=30)
    asked.becomes("low", "no-room", f"Insufficient example.com/{asked.namespace.namespace}")


def rejected(asked: Asked, name: str, policy: str = "ExitCode") -> None:
    """Create a job whose pod a kubelet rejects: the scheduler, which knows, is not asked."""
    node = asked.namespace.workers()[0]
    spec = {"nodeName": node}
    made = ours(job(name, SLEEP, policy=policy, pod=spec, resources=requests(cpu="500")))
    asked.namespace.kubectl("create", "-f", "-", stdin=made)


def test_a_node_that_refuses_a_pod(asked):
    """The pod's status has the kubelet's reason."""
    rejected(asked, "refused", "Never")
    node = asked.namespace.workers()[0]
    found = asked.becomes(
        "refused", "evicted", f"its node {node} has ended or refused it: OutOfcpu"
    )
    assert "Allocatable" in asked.shell(found.command)


def test_a_node_that_rejects_its_pods(asked):
    """Told with the kubelet's own reason; the command of the line stops it."""
    rejected(asked, "rejected")
    found = asked.becomes("rejected", "in-vain", "rejected-worker-0", "OutOfcpu")
    asked.shell(found.command)
    asked.becomes("rejected", "suspended")


REGISTRY = """
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Registry(BaseHTTPRequestHandler):
    def do_HEAD(self):
        if self.path.startswith("/v2/slow/"):
            time.sleep(600)
        self.send_response(401)
        self.send_header("WWW-Authenticate", 'Basic realm="none"')
        self.end_headers()

    do_GET = do_HEAD

ThreadingHTTPServer(("127.0.0.1", 5999), Registry).serve_forever()
"""


@pytest.fixture(scope="module")
def registry(asked) -> Iterator[str]:
    """A node with a registry at its own address, where no TLS is asked.

    It denies every image but `slow`, for which it accepts the request and then says nothing.
    """
    namespace, node = asked.namespace, asked.namespace.workers()[0]
    name = f"{namespace.namespace}-registry"
    image = f"gptddp:{__version__}"
    container = {"name": "registry", "image": image, "command": ["python", "-c", REGISTRY]}
    spec = {"nodeName": node, "hostNetwork": True, "containers": [container]}
    meta = {"name": "registry", "namespace": name}
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}
    namespace.kubectl("create", "--namespace", name, "-f", "-", stdin=[space, pod])
    ready = ("--for=condition=Ready", "--timeout=60s", "--namespace", name)
    namespace.kubectl("wait", "pod/registry", *ready)
    yield node
    namespace.kubectl("delete", "namespace", name, "--wait=false")


def pulls(asked: Asked, name: str, image: str, node: str) -> str:
    """Create a job whose pod asks the registry of this node for an image; the image's full name."""
    where = {"nodeSelector": {"kubernetes.io/hostname": node}}
    image = f"127.0.0.1:5999/{image}"
    asked.namespace.kubectl("create", "-f", "-", stdin=job(name, SLEEP, image=image, pod=where))
    return image


def test_an_image_that_the_registry_denies(asked, registry):
    """With the options that name another image, and a Secret with a right to it."""
    image = pulls(asked, "denied", "private:1", registry)
    words = (image, "--image-pull-secret", "denied-worker-0")
    asked.shell(asked.becomes("denied", "image-denied", *words).command)


def test_an_image_that_comes_slowly(asked, registry):
    """From a registry that accepts, and then says nothing: a pull, and no failure yet."""
    image = pulls(asked, "slow", "slow:1", registry)
    asked.becomes("slow", "starting", f'Pulling image "{image}"', "slow-worker-0")
