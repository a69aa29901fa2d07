"""A real Kueue on the kind cluster, for these tests alone, and a team with a queue of its own."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support import cluster_jobs
from support.toy import SMALL
from support.waiting import until

HERE = Path(__file__).parent
VERSION = "kueue.x-k8s.io/v1beta2"
KINDS = ("clusterqueue", "resourceflavor")


@pytest.fixture(scope="session", autouse=True)
def kueue(request, cluster) -> Iterator[None]:
    """Kueue, installed before the first test and removed after the last."""
    if not cluster.kind:
        pytest.skip("Kueue is installed on the kind cluster only")
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        if subprocess.run([HERE / "up"]).returncode:
            pytest.exit("Kueue was not installed: the reason is above", returncode=1)
    yield
    subprocess.run([HERE / "down"], check=True)


class Team:
    """A namespace with the LocalQueue `team` of a ClusterQueue, both its own."""

    def __init__(self, namespace: Any) -> None:
        self.namespace, self.own = namespace, namespace.namespace
        self.kubectl, self.get = namespace.kubectl, namespace.get
        self.kubectl("label", "namespace", self.own, "gptddp-kueue=managed")
        self.apply("ResourceFlavor", self.own, spec={})
        self.open()

    def apply(self, kind: str, name: str, **fields: Any) -> None:
        """Create or change an object of Kueue."""
        head = {"apiVersion": VERSION, "kind": kind, "metadata": {"name": name}}
        self.kubectl("apply", "-f", "-", stdin={**head, **fields})

    def open(self) -> None:
        """The queue takes and starts jobs."""
        self.set_quota()
        self.apply("LocalQueue", "team", spec={"clusterQueue": self.own, "stopPolicy": "None"})

    def set_quota(self, **spec: Any) -> None:
        """The ClusterQueue: one CPU, which is one job here."""
        quotas = [{"name": "cpu", "nominalQuota": "1"}, {"name": "memory", "nominalQuota": "99Gi"}]
        flavors = [{"name": self.own, "resources": quotas}]
        spec = {
            "namespaceSelector": {},
            "resourceGroups": [{"coveredResources": ["cpu", "memory"], "flavors": flavors}],
            "stopPolicy": "None",
            **spec,
        }
        self.apply("ClusterQueue", self.own, spec=spec)

    def cli(self, *args: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        return cluster_jobs.cli(self.namespace, *args, code=code)

    def submit(self, name: str, *more: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        """A job of two pods that takes the whole quota, and trains for long."""
        job = ("--name", name, "--replicas", "2", "--cpu", "500m", "--memory", "2Gi")
        train = ("--", *SMALL, "--steps", "1000000")
        queue = () if "--queue" in more else ("--queue", "team")
        return self.cli("submit", *job, *queue, *more, "--data", "data/corpus", *train, code=code)

    def says(self, name: str, *words: str, timeout_s: float = 120) -> str:
        """Wait until `status` of a job has all these words; returns it."""

        def shown() -> str:
            text = self.cli("status", name).stdout
            return text if all(word in text for word in words) else ""

        return str(self.until(shown, f"{words} of {name}", timeout_s))

    def until(self, true: Callable[[], Any], what: str, timeout_s: float = 120) -> Any:
        return until(true, what, timeout_s, poll_s=1)

    def empty(self) -> None:
        """Delete all jobs, and wait for the end of their pods."""
        for job in self.get("pytorchjobs"):
            self.cli("delete", job["metadata"]["name"])

    def remove(self) -> None:
        self.empty()
        for kind in KINDS:
            self.kubectl("delete", kind, self.own, "--ignore-not-found", "--wait=false")


@pytest.fixture(scope="session")
def the_team(kueue, new_namespace, corpus) -> Iterator[Team]:
    """A team whose claim `data` has the dataset `corpus`."""
    namespace = new_namespace()
    made = Team(namespace)
    shutil.copytree(corpus, namespace.shared / "data/corpus")
    yield made
    made.remove()
    namespace.remove()


@pytest.fixture
def team(the_team) -> Iterator[Team]:
    """The team, with an open queue, and without jobs of other tests."""
    yield the_team
    the_team.open()
    the_team.empty()
