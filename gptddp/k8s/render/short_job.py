"""The short Jobs of `prepare` and `sample`: pure functions from options to a Kubernetes object."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gptddp.errors import ConfigError
from gptddp.k8s.exit_codes import BAD_INPUT
from gptddp.k8s.objects import Object
from gptddp.k8s.render import manifest, names, quantity, restricted, rules
from gptddp.k8s.render.manifest import DATA, RUNS, SPEC_HASH, labels
from gptddp.k8s.render.problem import Found, Problem

SOURCE = "/source"  # mount path
_PREPARE_KEPT_S = 24 * 3600  # a finished `prepare`, with its log
_SAMPLE_LIMIT_S = 900  # the longest that a `sample` may take, its start included
# Standard output is the sample; standard error becomes the pod's status message.
_QUIET = 'exec "$@" 2>/dev/termination-log'
_PLACEMENT = ("imagePullSecrets", "nodeSelector", "tolerations")


@dataclass(frozen=True)
class ClaimPath:
    """A claim, and a path inside it: `CLAIM` or `CLAIM/PATH`."""

    claim: str
    path: str = ""

    @classmethod
    def parse(cls, flag: str, text: str) -> "ClaimPath":
        """Raises ConfigError where there is no claim's name, or the path leaves the claim."""
        claim, _, path = text.partition("/")
        rules.refuse([Problem("volumes", *found) for found in rules.claim_path(flag, claim, path)])
        return cls(claim, path.strip("/"))

    def at(self, mount: str) -> str:
        """The path where the claim is mounted at `mount`."""
        return f"{mount}/{self.path}" if self.path else mount

    def __str__(self) -> str:
        return self.at(self.claim)


def prepare_source(source: ClaimPath, data: ClaimPath) -> str:
    """Where the pod of `prepare` has the texts.

    One claim is mounted once: by their paths, prepare can see that one folder is in the other.
    """
    return source.at(DATA if source.claim == data.claim else SOURCE)


def prepare_job(
    name: str,
    source: ClaimPath,
    data: ClaimPath,
    options: Sequence[str],
    *,
    image: str,
    cpu: str,
    memory: str,
) -> Object:
    """The Job that runs `gptddp prepare SOURCE --out DATA OPTIONS` in a pod."""
    _check(name, image, cpu, memory)
    one = source.claim == data.claim
    if one and f"{source.path}/".startswith(f"{data.path}/" if data.path else ""):
        raise ConfigError(
            f"--source {source} lies in --data {data}: prepare into a folder of its own, as in "
            f"--data {data.claim}/dataset, and name it so to `submit` as well"
        )
    volumes = [restricted.claim_volume("data", data.claim)]
    mounts: list[Object] = [{"name": "data", "mountPath": DATA}]
    if not one:
        volumes.append(restricted.claim_volume("source", source.claim))
        mounts.append({"name": "source", "mountPath": SOURCE, "readOnly": True})
    command = ["gptddp", "prepare", prepare_source(source, data), "--out", data.at(DATA)]
    resources = {"cpu": cpu, "memory": memory}
    container = _container("prepare", image, [*command, *options], mounts)
    container["resources"] = {"requests": resources, "limits": dict(resources)}
    job = _job({"name": name}, name, "prepare", {"containers": [container], "volumes": volumes})
    # A wrong option or source stays wrong; a drained node does not count as a failure.
    wrong = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [BAD_INPUT]}}
    drained = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    job["spec"] |= {
        "backoffLimit": 3,
        "podFailurePolicy": {"rules": [wrong, drained]},
        "ttlSecondsAfterFinished": _PREPARE_KEPT_S,
    }
    job["metadata"]["annotations"] = {SPEC_HASH: manifest.spec_hash(job)}
    return job


def sample_job(
    name: str,
    options: Sequence[str],
    *,
    image: str,
    memory: str,
    data: str,
    runs: str,
    worker_pod_spec: Mapping[str, Any],
) -> Object:
    """The Job that runs `gptddp sample` on the run of this name; `data` and `runs` are claims.

    Its pod can run where those of `worker_pod_spec` can; that is empty where the job is gone.
    """
    _check(name, image, "1", memory)
    volumes = [restricted.claim_volume("data", data), restricted.claim_volume("runs", runs)]
    mounts: list[Object] = [
        {"name": "data", "mountPath": DATA, "readOnly": True},  # the tokenizer
        {"name": "runs", "mountPath": RUNS, "readOnly": True},
    ]
    command = ["sh", "-c", _QUIET, "sh", "gptddp", "sample", f"{RUNS}/{name}", *options]
    container = _container("sample", image, command, mounts)
    container["resources"] = {  # asks for little, to fit in beside a running job
        "requests": {"cpu": "100m", "memory": "256Mi"},
        "limits": {"cpu": "1", "memory": memory},
    }
    placement = {key: worker_pod_spec[key] for key in _PLACEMENT if key in worker_pod_spec}
    spec = {"containers": [container], "volumes": volumes, **placement}
    job = _job({"generateName": f"{name[:40]}-sample-"}, name, "sample", spec)
    job["spec"] |= {
        "backoffLimit": 0,
        # `sample` deletes its Job; these are for a `sample` that was killed.
        "activeDeadlineSeconds": _SAMPLE_LIMIT_S,
        "ttlSecondsAfterFinished": 60,
    }
    return job


def _check(name: str, image: str, cpu: str, memory: str) -> None:
    found: list[Found] = []
    if not names.is_label(name):
        found.append(("--name", f"{name!r} is not a DNS label", "use a-z, 0-9 and '-', up to 63"))
    if image.split() != [image]:
        found.append(("--image", f"{image!r} is not an image reference", "use NAME:TAG"))
    for flag, text in (("--cpu", cpu), ("--memory", memory)):
        if not quantity.parse(text):
            rule = f"{text!r} is not a positive Kubernetes quantity"
            found.append((flag, rule, "use one such as 2 or 4Gi"))
    rules.refuse([Problem("batch", *it) for it in found])


def _container(name: str, image: str, command: list[str], mounts: list[Object]) -> Object:
    return {
        "name": name,
        "image": image,
        "command": command,
        "env": [{"name": k, "value": v} for k, v in restricted.scratch_env().items()],
        **restricted.container_fields(),
        "volumeMounts": [*mounts, restricted.scratch_mount()],
    }


def _job(named: Object, instance: str, component: str, pod_spec: Object) -> Object:
    pod_spec["volumes"].append(restricted.scratch_volume())
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**named, "labels": labels(instance, component)},
        "spec": {
            "template": {
                "metadata": {"labels": labels(instance, component)},
                "spec": {
                    **restricted.pod_fields(),
                    "restartPolicy": "Never",
                    # Its process is the container's first, which the kernel keeps from SIGTERM.
                    "terminationGracePeriodSeconds": 5,
                    **pod_spec,
                },
            },
        },
    }
