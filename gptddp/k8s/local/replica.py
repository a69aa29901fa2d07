"""The pods that a PyTorchJob asks for, and their addresses on this machine."""

from dataclasses import dataclass

from gptddp.errors import ConfigError
from gptddp.k8s.objects import Object, replica_count, replica_specs


@dataclass(frozen=True)
class Network:
    """A local job's own addresses, and its own port for the rendezvous.

    The port differs from job to job as well: torch's store listens on every address.
    """

    prefix: str  # 127.A.B
    port: int

    def address(self, role: str, index: int) -> str:
        return f"{self.prefix}.{100 + index if role == 'Worker' else 99}"


@dataclass(frozen=True)
class Replica:
    """One pod of the job: its role (Worker or Master) and index, and what follows from them."""

    job: Object
    role: str
    index: int
    network: Network

    @property
    def short(self) -> str:
        return f"{self.role.lower()}-{self.index}"

    @property
    def name(self) -> str:
        return f"{self.job['metadata']['name']}-{self.short}"

    @property
    def address(self) -> str:
        return self.network.address(self.role, self.index)

    @property
    def spec(self) -> Object:
        """The replica's entry: replicas, restartPolicy, template."""
        return replica_specs(self.job)[self.role]

    @property
    def pod_spec(self) -> Object:
        spec: Object = self.spec["template"]["spec"]
        return spec

    @property
    def container(self) -> Object:
        """The pod's one container. Raises ConfigError for a pod that has more."""
        if self.pod_spec.get("initContainers") or len(self.pod_spec["containers"]) != 1:
            raise ConfigError(
                f"{self.name}: --local runs pods of one container and no initContainers; "
                "take the others out of the manifest"
            )
        container: Object = self.pod_spec["containers"][0]
        return container


def replicas(job: Object, network: Network) -> list[Replica]:
    """Every pod of the job, masters first, as the operator names them."""
    specs = replica_specs(job)
    return [
        Replica(job, role, index, network)
        for role in ("Master", "Worker")
        if role in specs
        for index in range(replica_count(specs[role]))
    ]
