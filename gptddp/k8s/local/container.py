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
from pathlib import Path

from gptddp.errors import ConfigError
from gptddp.k8s.local.replica import Replica, replicas
from gptddp.k8s.objects import Object, replica_count, replica_specs
from gptddp.k8s.render.companions import secret_ref
from gptddp.k8s.render.variables import JOB_ENV

# A container starts without what the user's shell exports for another job.
_NOT_INHERITED = re.compile(JOB_ENV + r"|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES")


# -- volumes -----------------------------------------------------------------------------------


def mounts(replica: Replica, scratch: Path, claims: Mapping[str, Path], default: Path) -> Object:
    """Mount path -> folder. Claims lie in `claims` or under `default`, emptyDirs in `scratch`.

    A Secret or a ConfigMap is a folder of `claims`.
    """
    folders: Object = {}
    for volume in replica.pod_spec.get("volumes") or []:
        if claim := volume.get("persistentVolumeClaim"):
            name = claim["claimName"]
            folder = Path(claims.get(name, default / name))
        elif "emptyDir" in volume:
            folder = scratch / volume["name"]
        elif path := volume.get("hostPath"):
            folder = Path(path["path"])
        elif (own := _own_folder(volume, claims)) is not None:
            folder = own
        elif stands_in := mounted_object(volume):
            kind, name = stands_in
            if name not in claims:
                raise ConfigError(
                    f"{replica.name}: --local does not have the {kind} {name}: name a folder with "
                    f"its keys as files, --volume {name}=FOLDER"
                )
            folder = Path(claims[name])
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


def mounted_object(volume: Object) -> tuple[str, str] | None:
    """(kind, name) of the Secret or ConfigMap that a volume shows."""
    for key, field, kind in (
        ("secret", "secretName", "Secret"),
        ("configMap", "name", "ConfigMap"),
    ):
        if key in volume:
            return kind, str(volume[key].get(field, ""))
    return None


def _own_folder(volume: Object, claims: Mapping[str, Path]) -> Path | None:
    """Where the ConfigMaps of a projected volume are, if that is one folder."""
    sources = (volume.get("projected") or {}).get("sources") or []
    folders = {claims.get((it.get("configMap") or {}).get("name", "")) for it in sources}
    return folders.pop() if len(folders) == 1 else None


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
    counts = {r: replica_count(s) for r, s in replica_specs(replica.job).items()}
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


def environment(replica: Replica, folders: Mapping[str, Path], key: str) -> dict[str, str]:
    """The container's whole environment: this machine's in the place of the image's, the
    manifest's, the operator's, and the pod's own name and address. `key`: the Secret's."""
    env = {k: v for k, v in os.environ.items() if not _NOT_INHERITED.fullmatch(k)}
    env["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", os.defpath)])
    env |= {"HOSTNAME": replica.name, "POD_ADDRESS": replica.address}
    env.setdefault("PYTHONUSERBASE", site.getuserbase())  # before the manifest moves HOME
    checkout = Path(__file__).parents[3]
    if (checkout / "pyproject.toml").exists():  # the pods run the code that runs here
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(checkout), env.get("PYTHONPATH")]))
    for item in replica.container.get("env") or []:
        if source := item.get("valueFrom"):
            own_secret = source == secret_ref(replica.job["metadata"]["name"])
            value = key if own_secret else _from_source(replica, item["name"], source, env)
        else:
            value = expanded(localized(str(item.get("value") or ""), folders), env)
        if value is not None:
            env[item["name"]] = value
    return env | operator_env(replica)


def _from_source(replica: Replica, name: str, source: Object, env: Mapping[str, str]) -> str | None:
    """The downward API's fields of the pod; what this shell exports for Secrets and ConfigMaps.

    None: the variable is not to be set.
    """
    for kind in ("Secret", "ConfigMap"):
        if reference := source.get(f"{kind[0].lower()}{kind[1:]}KeyRef"):
            if name not in env and not reference.get("optional"):
                raise ConfigError(
                    f"{replica.name}: {name} is in the {kind} {reference.get('name', '')}, which "
                    f"--local does not have: export {name} in this shell"
                )
            return env.get(name)
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
        "spec.serviceAccountName": replica.pod_spec.get("serviceAccountName") or "default",
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
