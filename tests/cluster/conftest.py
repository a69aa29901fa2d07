"""The cluster that the tests of this folder run on, and a namespace of its own for each of them."""

import json
import os
import secrets
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support import cluster_jobs

HERE = Path(__file__).parent
CONTROL_PLANE = "gptddp-control-plane"
SHARED = Path("/var/tmp/gptddp")  # /shared in every node of the kind cluster
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "gptddp")


def pytest_addoption(parser):
    parser.addoption("--kubeconfig", help="test on the cluster of this kubeconfig, not on kind")


class Cluster:
    """A cluster by its kubeconfig; `kind`: its nodes are containers of this machine."""

    def __init__(self, kubeconfig: Path, kind: bool) -> None:
        self.kubeconfig = kubeconfig
        self.kind = kind
        self.namespace = ""  # that of the kubeconfig

    def kubectl(self, *args: str, stdin: Any = None, check: bool = True, timeout_s: float = 120):
        """Run kubectl in this namespace; `stdin` may be an object or a list of them.

        Returns the finished process; AssertionError with kubectl's words if `check` and it failed.
        """
        command = ["kubectl", "--kubeconfig", str(self.kubeconfig), *args]
        if self.namespace:
            command[3:3] = ["-n", self.namespace]
        if isinstance(stdin, list):
            stdin = {"apiVersion": "v1", "kind": "List", "items": stdin}
        if stdin is not None and not isinstance(stdin, str):
            stdin = json.dumps(stdin)
        done = subprocess.run(
            command, input=stdin, text=True, capture_output=True, timeout=timeout_s
        )
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done

    def get(self, *args: str) -> Any:
        """An object, or the items of a list: `get("pods", "-l", "app=a")`."""
        found = json.loads(self.kubectl("get", *args, "-o", "json").stdout)
        return found.get("items", found)

    def workers(self) -> list[str]:
        """The names of the nodes that take pods."""
        return [
            node["metadata"]["name"]
            for node in self.get("nodes")
            if not any(t["effect"] == "NoSchedule" for t in node["spec"].get("taints", []))
        ]


class Namespace(Cluster):
    """A namespace with restricted Pod Security and the claims `data` and `runs`.

    On kind the claims are the folders of those names in `shared`, a folder of this machine;
    elsewhere `shared` is None and the default storage class serves them.
    """

    background = ThreadPoolExecutor(1)
    removals: list[Future[None]] = []

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster.kubeconfig, cluster.kind)
        self.namespace = f"gptddp-test-{secrets.token_hex(3)}"
        self.shared = SHARED / "tests" / self.namespace if cluster.kind else None
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        metadata = {"name": self.namespace, "labels": labels}
        objects = [{"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}]
        for name in ("data", "runs"):
            objects += self._volume(name)
        self.kubectl("apply", "-f", "-", stdin=objects)

    def _volume(self, name: str) -> list[dict[str, Any]]:
        size = {"storage": "10Gi"}
        access: dict[str, Any] = {"accessModes": ["ReadWriteMany"]}
        claim = {**access, "resources": {"requests": size}}
        if self.kind:
            path = f"/shared/tests/{self.namespace}/{name}"
            in_a_node("install", "-d", "-o", "1000", "-g", "1000", path)
            claim |= {"storageClassName": "", "volumeName": f"{self.namespace}-{name}"}
            reference = {"namespace": self.namespace, "name": name}
            volume = {**access, "capacity": size, "claimRef": reference, "hostPath": {"path": path}}
        metadata = {"name": name, "namespace": self.namespace}
        head = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata}
        objects = [{**head, "spec": claim}]
        if self.kind:
            metadata = {"name": claim["volumeName"]}
            head = {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": metadata}
            objects += [{**head, "spec": volume}]
        return objects

    def remove(self) -> None:
        """Delete it in the background; only the end of the session waits for it, see `cluster`."""
        self.removals.append(self.background.submit(self._remove))

    def _remove(self) -> None:
        # the controller deletes a namespace at once if its pods are gone, and else at a second try
        self.kubectl("delete", "pytorchjobs,jobs", "--all")
        self.kubectl("delete", "pods", "--all", "--grace-period=1")
        self.kubectl("delete", "namespace", self.namespace, "--ignore-not-found", "--wait=false")
        if self.kind:
            volumes = [f"{self.namespace}-{name}" for name in ("data", "runs")]
            self.kubectl("delete", "pv", "--ignore-not-found", "--wait=false", *volumes)
            in_a_node("rm", "-rf", f"/shared/tests/{self.namespace}")


def in_a_node(*command: str) -> None:
    """Run a command as root where /shared is the shared folder."""
    subprocess.run(["docker", "exec", CONTROL_PLANE, *command], check=True, capture_output=True)


@pytest.fixture(scope="session")
def cluster(request, tmp_path_factory) -> Iterator[Cluster]:
    """The cluster of --kubeconfig; else the kind cluster, started or brought up to date."""
    yield _cluster(request, tmp_path_factory)
    for removal in Namespace.removals:
        removal.result()


def _cluster(request, tmp_path_factory) -> Cluster:
    given = request.config.getoption("--kubeconfig")
    os.environ["PATH"] = f"{os.environ.get('GPTDDP_CACHE', CACHE)}/bin:{os.environ['PATH']}"
    if given:
        if not shutil.which("kubectl"):
            pytest.fail("kubectl is not installed: https://kubernetes.io/docs/tasks/tools")
        return Cluster(Path(given).resolve(), kind=False)
    if not os.environ.get("GPTDDP_CI"):  # .ci/run has just started it
        with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
            if subprocess.run([HERE / "up"]).returncode:
                pytest.exit("there is no cluster to test on: the reason is above", returncode=1)
    kubeconfig = tmp_path_factory.mktemp("cluster") / "kubeconfig"
    command = ["kind", "get", "kubeconfig", "--name", "gptddp"]
    kubeconfig.write_text(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout
    )
    return Cluster(kubeconfig, kind=True)


@pytest.fixture(scope="session")
def new_namespace(cluster):
    """new_namespace() -> Namespace, for a fixture of another scope than `namespace`."""
    return lambda: Namespace(cluster)


@pytest.fixture
def namespace(cluster) -> Iterator[Namespace]:
    """A namespace for this test alone; it is deleted after the test, with all objects in it."""
    made = Namespace(cluster)
    yield made
    made.remove()


@pytest.fixture(scope="session")
def load_image(cluster):
    """load_image(tag, dockerfile): an image for nodes that reach no registry; others pull it."""

    def load(tag: str, dockerfile: str) -> None:
        node = ["docker", "inspect", "--format", "{{.Config.Image}}", CONTROL_PLANE]
        image = subprocess.run(node, check=True, capture_output=True, text=True).stdout
        if not image.startswith("gptddp-node:"):  # made by tests/cluster/up from modules
            return
        build = ["docker", "build", "--tag", tag, "-"]
        env = os.environ | {"DOCKER_BUILDKIT": "0"}
        subprocess.run(build, input=dockerfile, check=True, capture_output=True, text=True, env=env)
        load = [HERE / "modules/load-image", tag, *cluster.workers()]
        subprocess.run(load, check=True, capture_output=True)
        # the nodes have it; on this machine the name stays free for the registry's image
        subprocess.run(["docker", "rmi", "--no-prune", tag], capture_output=True)

    return load


@pytest.fixture(scope="session")
def prepared(cluster) -> Iterator[Namespace]:
    """A namespace whose claim `data` holds the dataset `corpus`, made by a Job on the cluster.

    The text is Python's standard library without its packages, some four megabytes.
    """
    if not cluster.kind:
        pytest.skip("runs are read from the shared folder of the kind cluster")
    made = Namespace(cluster)
    assert made.shared
    try:
        source = made.shared / "data/source"
        source.mkdir()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            (source / path.name).write_bytes(path.read_bytes())
        options = ["--source=data/source", "--data=data/corpus", "--cpu=400m", "--wait"]
        cluster_jobs.cli(made, "prepare", *options, "--", "--vocab-size=1024")
        yield made
    finally:
        made.remove()
