"""The facts of this pod, from the operator and the manifest, as torchrun's command line."""

import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field

from gptddp.errors import ConfigError
from gptddp.grace import KILL_S, limit_s

KEY = "GPTDDP_RENDEZVOUS_KEY"  # the job's key: it authenticates its pods to each other
LEAST_KEY = 32  # characters
ALONE = "127.0.0.1:0"  # the endpoint of a job of one pod: no other pod needs it
_OF_THE_POD = ("RANK", "WORLD_SIZE", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT")


@dataclass(frozen=True)
class PodFacts:
    """The facts of this pod that torchrun needs."""

    address: str
    endpoint: str
    nodes: tuple[int, int]  # fewest and most pods
    workers: int  # a pod
    rdzv_id: str
    grace_s: int
    key: str = field(repr=False)  # empty: the job has none

    @property
    def port(self) -> int:
        """Port of each pod's first launcher; its other launchers have the next ports."""
        return int(self.endpoint.rpartition(":")[2])

    @property
    def largest_world(self) -> int:
        return self.nodes[1] * self.workers


def pod_from(env: Mapping[str, str]) -> PodFacts:
    """Read the operator's PET_* and the manifest's variables; a ConfigError names a bad one."""
    least, _, most = env.get("PET_NNODES", "1").partition(":")
    nodes = (_number("PET_NNODES", least), _number("PET_NNODES", most or least))
    if not 1 <= nodes[0] <= nodes[1]:
        raise ConfigError(f"PET_NNODES is {env['PET_NNODES']!r}: it must be MIN:MAX, MIN >= 1")
    endpoint = env.get("PET_RDZV_ENDPOINT", "")
    if not endpoint and env.get("PET_MASTER_ADDR"):
        endpoint = _master(env)
    if not endpoint and nodes[1] > 1:
        raise ConfigError(
            f"PET_NNODES is {env['PET_NNODES']!r} but neither PET_RDZV_ENDPOINT nor PET_MASTER_ADDR"
            " is set: pods need HOST:PORT to meet; the operator sets the first for a PyTorchJob "
            "with an elasticPolicy, the second for one with a Master"
        )
    names = [env.get(name, "") for name in ("POD_ADDRESS", "POD_NAME", "HOSTNAME")]
    address = next(filter(None, names), socket.gethostname()) if endpoint else "127.0.0.1"
    host, _, port = endpoint.rpartition(":")
    if endpoint and not (host.strip("[]") and port.isdigit()):
        raise ConfigError(f"PET_RDZV_ENDPOINT is {endpoint!r}: it must be HOST:PORT")
    return PodFacts(
        address=address,
        endpoint=endpoint or ALONE,
        nodes=nodes,
        workers=_workers(env.get("PET_NPROC_PER_NODE", "1")),
        rdzv_id=env.get("PET_RDZV_ID") or "gptddp",
        grace_s=_number("GPTDDP_GRACE_S", env.get("GPTDDP_GRACE_S", "30")),
        key=_key(env.get(KEY, "")) if endpoint else os.urandom(32).hex(),
    )


def _master(env: Mapping[str, str]) -> str:
    """HOST:PORT of the Master's pod, in a job without elasticPolicy.

    The size of the job is fixed; torchrun's other uses of PET_MASTER_* do not matter here.
    """
    for name in ("PET_MASTER_PORT", "PET_NODE_RANK"):
        _number(name, env.get(name, ""))
    return f"{env['PET_MASTER_ADDR']}:{env['PET_MASTER_PORT']}"


def as_elastic(pod: PodFacts, env: MutableMapping[str, str]) -> None:
    """Give a pod of a job with a Master the environment of any other pod, in place.

    The operator numbers its pods by variables that torchrun gives to workers, so the launcher would
    look like a worker. And a job is known by its endpoint, which this pod is not given.
    """
    for name in _OF_THE_POD:
        env.pop(name, None)
    if pod.endpoint != ALONE:
        env.setdefault("PET_RDZV_ENDPOINT", pod.endpoint)


def forget_key() -> None:
    """Remove the key from this process's environment: its children do not need it.

    `/proc/PID/environ` shows memory that keeps a removed variable, and a fork copies it. So the
    value there is overwritten.
    """
    import ctypes  # for pods only: the control plane imports this module too

    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    if at := libc.getenv(KEY.encode()):
        ctypes.memset(at, ord("-"), len(os.environb.get(KEY.encode(), b"")))
    os.environ.pop(KEY, None)


def _key(text: str) -> str:
    """The job's key; a message must not show it."""
    key = text.strip()  # a file made by `echo` ends with a line feed
    if key and len(key) < LEAST_KEY:
        raise ConfigError(
            f"{KEY} has {len(key)} characters: a key must have {LEAST_KEY} at least, as "
            "`openssl rand -hex 32` makes it"
        )
    return key


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} is {text!r}: it must be a whole number") from None


def _workers(text: str) -> int:
    """`auto`: one worker a GPU, or one without a GPU; torchrun would take one a CPU of the node."""
    if text not in ("auto", "gpu"):
        workers = _number("PET_NPROC_PER_NODE", text)
    else:
        import torch

        workers = torch.cuda.device_count() or int(text == "auto")
    if workers < 1:
        raise ConfigError(f"PET_NPROC_PER_NODE is {text!r}: use a number >= 1, or auto")
    return workers


def seeds(pod: PodFacts) -> list[str]:
    """HOST:PORT of each launcher of the job that can be known; these report the others.

    The endpoint is one pod of many, and may be lost. But the operator numbers the names of its
    workers, and `--local` their addresses, from the endpoint on.
    """
    host, most = pod.endpoint.rpartition(":")[0], range(pod.nodes[1])
    hosts = [host]
    with contextlib.suppress(ValueError):
        first = ipaddress.IPv4Address(host)
        hosts += [str(first + i) for i in most if first.is_loopback]
    if found := re.fullmatch(r"([^.]+-)\d+(\..*)?", host):
        workers = found[1].replace("-master-", "-worker-")
        hosts += [f"{workers}{i}{found[2] or ''}" for i in most]
    ports = range(pod.port, pod.port + pod.workers) if pod.port else ()
    return [f"{it}:{port}" for it in dict.fromkeys(hosts) for port in ports]


def torchrun_args(pod: PodFacts, script: str, args: Sequence[str]) -> list[str]:
    """The command line of torchrun, for one worker that is started once."""
    return [
        "--nnodes=1",
        "--nproc-per-node=1",
        "--rdzv-backend=gptddp",
        f"--rdzv-endpoint={pod.endpoint}",
        f"--rdzv-id={pod.rdzv_id}",
        "--rdzv-conf=",
        f"--local-addr={pod.address}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        f"--shutdown-timeout={max(1, int(limit_s(pod.grace_s, KILL_S)))}",
        "--signals-to-handle=SIGQUIT",  # the launcher handles the others, from its start on
        f"--log-dir={os.devnull}",  # workers write to the pod's own output
        "--start-method=forkserver",
        "--run-path",
        "--",  # or torchrun may take a flag of the trainer for an abbreviation of its own flags
        script,
        *args,
    ]
