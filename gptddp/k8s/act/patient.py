"""What `doctor` looks at: a cluster, and the job that is to run on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gptddp.k8s.cluster import Cluster
from gptddp.k8s.objects import Object, replica_count, worker_pod_spec, worker_spec

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, how it is, and what helps; `warn` may be right as it is."""

    id: str
    status: str
    text: str
    fix: str = ""


class Patient:
    """A cluster's namespace, and the objects of a job as `submit` would create them."""

    def __init__(self, cluster: Cluster, objects: Sequence[Object]) -> None:
        self.cluster = cluster
        *self.helpers, self.job = objects
        self.pod_spec, self.count = worker_pod_spec(self.job), replica_count(worker_spec(self.job))

    def items(self, path: str, query: Mapping[str, Any] | None = None) -> list[Object]:
        """The objects of a list. Raises ClusterError."""
        return list(self.cluster.ask(path, query).get("items") or [])

    def here(self, group: str, plural: str) -> list[Object]:
        """The objects of a kind in the namespace."""
        return self.items(f"/{group}/namespaces/{self.cluster.namespace}/{plural}")

    @cached_property
    def nodes(self) -> list[Object]:
        """All nodes of the cluster. Raises ClusterError."""
        return self.items("/api/v1/nodes")

    @cached_property
    def requests(self) -> dict[str, str]:
        """What a pod asks for, as quantities; of all its containers the one that trains."""
        resources = self.pod_spec["containers"][0].get("resources") or {}
        return dict(resources.get("requests") or {})
