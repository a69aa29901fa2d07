"""What the container of a pod sees, worked out for a process on this machine.

The manifest's environment and then the operator's, `$(VAR)` references, and folders in the place of
mount paths. Not enforced: read-only mounts, memory and volume limits, security contexts, probes.
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

# A container starts without what the user's shell exports for another job.
_NOT_INHERITED = re.compile(JOB_ENV + r"|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES")
_NAME = {"fieldRef": {"fieldPath": "metadata.name"}}


@dataclass(frozen=True)
class Network:
    """A local job's own addresses, and its own port for the rendezvous.

    The port differs from job to job as well: torch's store listens on every address.
    """

    prefix: str  # 127.A.B
    port: int

    def address(self, index: int) -> str:
        return f"{self.prefix}.{100 + index}"


def name_of(job: Object, index: int) -> str:
    """The name of a pod, as the operator gives it."""
    return f"{job['metadata']['name']}-worker-{index}"


def container_of(job: Object) -> Object:
    """The trainer's container; a patch may bring others, which do not run here."""
    containers: list[Object] = worker_pod_spec(job)["containers"]
    return next((it for it in containers if it["name"] == CONTAINER), containers[0])


def mounts(job: Object, volumes: Mapping[str, Path], scratch: Path) -> dict[str, Path]:
    """Mount path -> folder: those in `volumes`, by a volume's name, outlive a pod, no others do.

    Raises ConfigError for a mount without its volume.
    """
    known, found = {it["name"] for it in worker_pod_spec(job).get("volumes") or []}, {}
    for mount in container_of(job).get("volumeMounts") or []:
        path, name = mount["mountPath"].rstrip("/"), mount["name"]
        if name not in known:
            raise ConfigError(f"volumeMounts: {path} is of the volume {name}, and there is none")
        found[path] = volumes.get(name, scratch / name).absolute()
    return found


def localized(text: str, folders: Mapping[str, Path]) -> str:
    """The text with every mount path in it replaced by its folder: `--run=/runs/x`, `a:/data`.

    Only whole path components count: /data is in /data/x, and not in /database or s3://b/data.
    """
    longest_first = sorted(folders, key=len, reverse=True)
    paths = "|".join(re.escape(path) for path in longest_first)
    pattern = rf"(?<![\w.\-/])(?:{paths})(?=/|$|[^\w.\-])"
    return re.sub(pattern, lambda match: str(folders[match.group()]), text)


def expanded(text: str, env: Mapping[str, str]) -> str:
    """`$(NAME)` replaced as the kubelet does: unknown names stay, `$$` is a dollar sign."""
    return re.sub(
        r"\$\$|\$\(([^()]*)\)",
        lambda m: "$" if m.group() == "$$" else env.get(m.group(1), m.group()),
        text,
    )


def machine_env() -> dict[str, str]:
    """This machine's environment in the place of an image's; programs of ours are found in it."""
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
    """The container's whole environment. `key`: what the job's Secret has on a cluster."""
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
                f"--local does not have what {item['name']} comes from on a cluster "
                f"({' '.join(source)}): export {item['name']} in this shell"
            )
    return env | operator_env(job, network)


def operator_env(job: Object, network: Network) -> dict[str, str]:
    """What the operator appends to a container's environment (`pt/envvar.go`, `pt/elastic.go`)."""
    spec, policy = job["spec"], job["spec"]["elasticPolicy"]
    return {
        "PYTHONUNBUFFERED": "1",
        "PET_NPROC_PER_NODE": str(spec["nprocPerNode"]),
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        # an address stands in for the name that DNS would resolve
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
