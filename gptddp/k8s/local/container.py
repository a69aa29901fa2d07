"""What a container of a PyTorchJob sees, worked out for a process on this machine.

The operator's variables after the manifest's own, `$(VAR)` references, the downward API, and mount
paths replaced by folders. Not enforced: read-only mounts, memory and volume limits, security
contexts, probes.
"""

import os
import re
import site
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptddp.errors import ConfigError

Object = dict[str, Any]

# A container starts without what the user's shell exports for another job.
_FOREIGN = re.compile(
    r"PET_.*|TORCHELASTIC_.*|GPTDDP_.*|(MASTER|POD)_.*|WORLD_SIZE|(LOCAL_|NODE_|GROUP_)?RANK"
    r"|LOCAL_WORLD_SIZE|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES"
)


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
        entry: Object = self.job["spec"]["pytorchReplicaSpecs"][self.role]
        return entry

    @property
    def pod(self) -> Object:
        spec: Object = self.spec["template"]["spec"]
        return spec

    @property
    def container(self) -> Object:
        """The one container; others cannot be run here."""
        if self.pod.get("initContainers") or len(self.pod["containers"]) != 1:
            raise ConfigError(
                f"{self.name}: --local runs pods of one container and no initContainers; "
                "take the others out of the manifest"
            )
        container: Object = self.pod["containers"][0]
        return container


def replicas(job: Object, network: Network) -> list[Replica]:
    """Every pod of the job, masters first, as the operator names them."""
    specs = job["spec"]["pytorchReplicaSpecs"]
    return [
        Replica(job, role, index, network)
        for role in ("Master", "Worker")
        if role in specs
        for index in range(int(specs[role].get("replicas", 1)))
    ]


# -- volumes -----------------------------------------------------------------------------------


def mounts(replica: Replica, scratch: Path, claims: Mapping[str, Path], default: Path) -> Object:
    """Mount path -> folder. Claims lie in `claims` or under `default`, emptyDirs in `scratch`."""
    folders: Object = {}
    for volume in replica.pod.get("volumes") or []:
        if claim := volume.get("persistentVolumeClaim"):
            name = claim["claimName"]
            folder = Path(claims.get(name, default / name))
        elif "emptyDir" in volume:
            folder = scratch / volume["name"]
        elif path := volume.get("hostPath"):
            folder = Path(path["path"])
        else:
            kind = next((key for key in volume if key != "name"), "nothing")
            raise ConfigError(
                f"{replica.name}: --local has no volume of the kind {kind} ({volume['name']}); "
                "use a persistentVolumeClaim, an emptyDir or a hostPath"
            )
        folders[volume["name"]] = folder
    result = {}
    for mount in replica.container.get("volumeMounts") or []:
        if mount["name"] not in folders:
            raise ConfigError(f"{replica.name}: no volume is named {mount['name']!r}")
        path = mount["mountPath"].rstrip("/") or "/"
        result[path] = (folders[mount["name"]] / mount.get("subPath", "").strip("/")).absolute()
    return result


def localized(text: str, folders: Mapping[str, Path]) -> str:
    """The text with every mount path in it replaced by its folder: `--run=/runs/x`, `a:/data`.

    Only whole path components count: /data is in /data/x, and not in /database or s3://b/data.
    """
    if not folders:
        return text
    longest_first = sorted(folders, key=len, reverse=True)
    paths = "|".join(re.escape(path) for path in longest_first)
    pattern = rf"(?<![\w.\-/])(?:{paths})(?=/|$|[^\w.\-])"
    return re.sub(pattern, lambda match: str(folders[match.group()]), text)


# -- environment and command -------------------------------------------------------------------


def expanded(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` replaced as the kubelet does: unknown names stay, `$$` is a dollar sign."""
    return re.sub(
        r"\$\$|\$\(([^()]*)\)",
        lambda m: "$" if m.group() == "$$" else env.get(m.group(1), m.group()),
        text,
    )


def operator_env(replica: Replica) -> dict[str, str]:
    """What the operator appends to a container's environment (`pt/envvar.go`, `pt/elastic.go`)."""
    spec, network = replica.job["spec"], replica.network
    counts = {r: int(s.get("replicas", 1)) for r, s in spec["pytorchReplicaSpecs"].items()}
    policy: Object | None = spec.get("elasticPolicy")
    per_node = spec.get("nprocPerNode") or (policy or {}).get("nProcPerNode") or "auto"
    env = {"PYTHONUNBUFFERED": "1"}
    if "Master" in counts:
        rank = replica.index + (replica.role == "Worker")
        processes = int(per_node) if str(per_node).isdigit() else 1
        env |= {"MASTER_PORT": str(network.port), "PET_MASTER_PORT": str(network.port)}
        env |= dict.fromkeys(("MASTER_ADDR", "PET_MASTER_ADDR"), network.address("Master", 0))
        env |= {"WORLD_SIZE": str(sum(counts.values()) * processes)}
        env |= {"RANK": str(rank), "PET_NODE_RANK": str(rank)}
    env["PET_NPROC_PER_NODE"] = str(per_node)
    if policy is None:
        return env | {"PET_NNODES": str(sum(counts.values()))}
    return env | _elastic_env(replica, policy, counts["Worker"])


def _elastic_env(replica: Replica, policy: Object, workers: int) -> dict[str, str]:
    low, high = policy.get("minReplicas"), policy.get("maxReplicas")
    known = [n for n in (low, high) if n is not None] or [workers]
    host, port = policy.get("rdzvHost"), policy.get("rdzvPort")
    ours = {r.name: r.address for r in replicas(replica.job, replica.network)}
    first = f"{replica.job['metadata']['name']}-worker-0"
    if host in (None, *ours):  # addresses stand in for the names that DNS would resolve
        host, port = ours[host or first], replica.network.port
    env = {
        "PET_NNODES": f"{known[0]}:{known[-1]}",
        "PET_RDZV_ENDPOINT": f"{host}:{port or replica.network.port}",
        "PET_RDZV_BACKEND": str(policy.get("rdzvBackend") or "c10d"),
    }
    if policy.get("maxRestarts") is not None:
        env["PET_MAX_RESTARTS"] = str(policy["maxRestarts"])
    if policy.get("rdzvId") is not None:
        env["PET_RDZV_ID"] = str(policy["rdzvId"])
    if conf := policy.get("rdzvConf"):
        env["PET_RDZV_CONF"] = ",".join(f"{item['key']}={item['value']}" for item in conf)
    return env


def environment(replica: Replica, folders: Mapping[str, Path]) -> dict[str, str]:
    """The container's whole environment: this machine's in the place of the image's, the
    manifest's, the operator's, and the pod's own name and address."""
    env = {k: v for k, v in os.environ.items() if not _FOREIGN.fullmatch(k)}
    env["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", os.defpath)])
    env |= {"HOSTNAME": replica.name, "POD_ADDRESS": replica.address}
    env.setdefault("PYTHONUSERBASE", site.getuserbase())  # before the manifest moves HOME
    checkout = Path(__file__).parents[3]
    if (checkout / "pyproject.toml").exists():  # the pods run the code that runs here
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(checkout), env.get("PYTHONPATH")]))
    if replica.container.get("envFrom"):
        raise ConfigError(f"{replica.name}: --local has no envFrom; name the variables in env")
    for item in replica.container.get("env") or []:
        if source := item.get("valueFrom"):
            value = _from_source(replica, item["name"], source)
        else:
            value = expanded(localized(str(item.get("value") or ""), folders), env)
        env[item["name"]] = value
    return env | operator_env(replica)


def _from_source(replica: Replica, name: str, source: Object) -> str:
    """The downward API's fields of the pod; a Secret or ConfigMap does not exist here."""
    path = (source.get("fieldRef") or {}).get("fieldPath")
    metadata = replica.spec["template"].get("metadata") or {}
    key = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path or "")
    if key and key[1] == "labels":
        return str({**(metadata.get("labels") or {}), **_operator_labels(replica)}.get(key[2], ""))
    if key:
        return str((metadata.get("annotations") or {}).get(key[2], ""))
    known = {
        "metadata.name": replica.name,
        "metadata.namespace": replica.job["metadata"].get("namespace") or "default",
        "metadata.uid": str(uuid.uuid4()),
        "spec.nodeName": socket.gethostname(),
        "spec.serviceAccountName": replica.pod.get("serviceAccountName") or "default",
        "status.podIP": replica.address,
        "status.podIPs": replica.address,
        "status.hostIP": replica.address,
    }
    if path not in known:
        kind = path or next(iter(source), "nothing")
        raise ConfigError(
            f"{replica.name}: --local cannot set {name} from {kind}; give it a plain value"
        )
    return known[path]


def _operator_labels(replica: Replica) -> dict[str, str]:
    prefix = "training.kubeflow.org/"
    return {
        prefix + "operator-name": "pytorchjob-controller",
        prefix + "job-name": replica.job["metadata"]["name"],
        prefix + "replica-type": replica.role.lower(),
        prefix + "replica-index": str(replica.index),
    }


def command(replica: Replica, folders: Mapping[str, Path], env: Mapping[str, str]) -> list[str]:
    """The process to start: the manifest's `command`, or the image's entrypoint, and `args`."""
    container = replica.container
    given, args = (
        [expanded(localized(str(word), folders), env) for word in container.get(key) or []]
        for key in ("command", "args")
    )
    program = given or [sys.executable, "-m", "gptddp.launch"]
    if program[0] in ("python", "python3"):
        program[0] = sys.executable
    return [*program, *args]
