"""Computes a pod's container environment for a process on this machine.

That is the manifest's environment, then the operator's, `$(VAR)` references, and folders in place
of mount paths. Not enforced: read-only mounts, memory and volume limits, security contexts, probes.
"""

import os
import re
import site
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gptddp.errors import ConfigError
from gptddp.k8s.objects import Object, worker_pod_spec
from gptddp.k8s.observe.pod_log import CONTAINER
from gptddp.k8s.render.companions import secret_ref
from gptddp.k8s.render.variables import JOB_ENV

# Variables that the user's shell exports for another job; a container does not get them.
_NOT_INHERITED = re.compile(JOB_ENV + r"|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES")
_NAME = {"fieldRef": {"fieldPath": "metadata.name"}}


@dataclass(frozen=True)
class Network:
    """A local job's own addresses, and its own port for the rendezvous.

    Each job needs its own port too, as torch's store listens on every address.
    """

    prefix: str  # 127.A.B
    port: int

    def address(self, index: int) -> str:
        return f"{self.prefix}.{100 + index}"


def name_of(job: Object, index: int) -> str:
    """The name that the operator gives a pod."""
    return f"{job['metadata']['name']}-worker-{index}"


def container_of(job: Object) -> Object:
    """The trainer's container; containers added by a patch do not run here."""
    containers: list[Object] = worker_pod_spec(job)["containers"]
    return next((it for it in containers if it["name"] == CONTAINER), containers[0])


def mounts(job: Object, volumes: Mapping[str, Path], scratch: Path) -> dict[str, Path]:
    """Mount path -> folder. Folders in `volumes` (by volume name) outlive a pod; others do not.

    Raises ConfigError for a mount without its volume.
    """
    known, found = {it["name"] for it in worker_pod_spec(job).get("volumes") or []}, {}
    for mount in container_of(job).get("volumeMounts") or []:
        path, name = mount["mountPath"].rstrip("/"), mount["name"]
        if name not in known:
            raise ConfigError(f"volumeMounts: {path} names the volume {name}, which does not exist")
        found[path] = volumes.get(name, scratch / name).absolute()
    return found


def localized(text: str, folders: Mapping[str, Path]) -> str:
    """Replace every mount path in the text by its folder: `--run=/runs/x`, `a:/data`.

    Only whole path components match: /data is in /data/x, and not in /database or s3://b/data.
    """
    longest_first = sorted(folders, key=len, reverse=True)
    paths = "|".join(re.escape(path) for path in longest_first)
    pattern = rf"(?<![\w.\-/])(?:{paths})(?=/|$|[^\w.\-])"
    return re.sub(pattern, lambda match: str(folders[match.group()]), text)


def expanded(text: str, env: Mapping[str, str]) -> str:
    """Replace `$(NAME)` like the kubelet: unknown names stay, `$$` is a dollar sign."""
    return re.sub(
        r"\$\$|\$\(([^()]*)\)",
        lambda m: "$" if m.group() == "$$" else env.get(m.group(1), m.group()),
        text,
    )


def machine_env() -> dict[str, str]:
    """This machine's environment in place of an image's, with our programs on its PATH."""
    env = {k: v for k, v in os.environ.items() if not _NOT_INHERITED.fullmatch(k)}
    env["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", os.defpath)])
    env.setdefault("PYTHONUSERBASE", site.getuserbase())  # before the manifest moves HOME
    checkout = Path(__file__).parents[3]
    if (checkout / "pyproject.toml").exists():  # the pods run the code that runs here
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(checkout), env.get("PYTHONPATH")]))
    return env


def environment(
    job: Object, index: int, network: Network, folders: Mapping[str, Path], key: str
) -> dict[str, str]:
    """The container's whole environment. `key`: the key that the job's Secret has on a cluster."""
    name = name_of(job, index)
    env = machine_env() | {"HOSTNAME": name, "POD_ADDRESS": network.address(index)}
    for item in container_of(job).get("env") or []:
        source = item.get("valueFrom")
        if not source:
            env[item["name"]] = expanded(localized(str(item.get("value") or ""), folders), env)
        elif source == _NAME:
            env[item["name"]] = name
        elif source == secret_ref(job["metadata"]["name"]):
            env[item["name"]] = key
        elif item["name"] not in env:
            raise ConfigError(
                f"--local cannot read {item['name']} from its source on a cluster "
                f"({' '.join(source)}): export {item['name']} in this shell"
            )
    return env | operator_env(job, network)


def operator_env(job: Object, network: Network) -> dict[str, str]:
    """Variables that the operator appends to a container's (`pt/envvar.go`, `pt/elastic.go`)."""
    spec, policy = job["spec"], job["spec"]["elasticPolicy"]
    return {
        "PYTHONUNBUFFERED": "1",
        "PET_NPROC_PER_NODE": str(spec["nprocPerNode"]),
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        # an address in place of a DNS name
        "PET_RDZV_ENDPOINT": f"{network.address(0)}:{network.port}",
        "PET_RDZV_ID": str(policy["rdzvId"]),
    }


def command(job: Object, folders: Mapping[str, Path], env: Mapping[str, str]) -> list[str]:
    """The process to start: the manifest's `command`, or the image's entrypoint, and `args`."""
    given, args = (
        [expanded(localized(str(word), folders), env) for word in container_of(job).get(key) or []]
        for key in ("command", "args")
    )
    program = given or ["python", "-m", "gptddp.launch"]
    if program[0] == "python":
        program[0] = sys.executable
    return [*program, *args]
