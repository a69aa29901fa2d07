"""The batch Jobs of `prepare` and `sample`: pure functions from options to a Kubernetes object."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gptddp.errors import ConfigError
from gptddp.k8s.render import manifest, quantity, restricted, rules
from gptddp.k8s.render.manifest import DATA, RUNS, SPEC_HASH, labels
from gptddp.k8s.render.rules import Found, Problem

Object = dict[str, Any]

SOURCE = "/source"  # mount path
_KEPT_S = 24 * 3600  # a finished `prepare`, with its log
_SAMPLE_S = 900  # the longest that a `sample` may take, its start included
# Standard output is the sample; what else is said becomes the pod's status message.
_QUIET = 'exec "$@" 2>/dev/termination-log'
_PREFERRED = ("imagePullSecrets", "nodeSelector", "tolerations")


@dataclass(frozen=True)
class Place:
    """A claim, and a path inside it: `CLAIM` or `CLAIM/PATH`."""

    claim: str
    path: str = ""

    @classmethod
    def parse(cls, flag: str, text: str) -> "Place":
        """Raises ConfigError where there is no claim's name, or the path leaves the claim."""
        claim, _, path = text.partition("/")
        rules.refuse([Problem("volumes", *found) for found in rules.place(flag, claim, path)])
        return cls(claim, path.strip("/"))

    def at(self, mount: str) -> str:
        return f"{mount}/{self.path}" if self.path else mount

    def __str__(self) -> str:
        return self.at(self.claim)


def prepare_job(
    name: str, source: Place, data: Place, options: Sequence[str], *, image: str, cpu: str,
    memory: str,
) -> Object:  # fmt: skip
    """The Job that runs `gptddp prepare SOURCE --out DATA OPTIONS` in a pod."""
    _check(name, image, cpu, memory)
    # One claim is mounted once: by their paths, prepare can see that one folder is in the other.
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
    command = ["gptddp", "prepare", source.at(DATA if one else SOURCE), "--out", data.at(DATA)]
    resources = {"cpu": cpu, "memory": memory}
    container = _container("prepare", image, [*command, *options], mounts)
    container["resources"] = {"requests": resources, "limits": dict(resources)}
    job = _job({"name": name}, name, "prepare", {"containers": [container], "volumes": volumes})
    job["spec"] |= {
        "backoffLimit": 3,
        "podFailurePolicy": {
            "rules": [
                # A wrong option or source stays wrong; a drained node is not its fault.
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [2]}},
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]},
            ]
        },
        "ttlSecondsAfterFinished": _KEPT_S,
    }
    job["metadata"]["annotations"] = {SPEC_HASH: manifest.spec_hash(job)}
    return job


def sample_job(
    name: str, options: Sequence[str], *, image: str, memory: str, data: str, runs: str,
    pod: Mapping[str, Any] | None = None,
) -> Object:  # fmt: skip
    """The Job that runs `gptddp sample` on the run of this name; `data` and `runs` are claims.

    `pod` is the spec of the job's own pods, so that it runs where they can.
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
    kept = {key: pod[key] for key in _PREFERRED if key in pod} if pod else {}
    spec = {"containers": [container], "volumes": volumes, **kept}
    job = _job({"generateName": f"{name[:40]}-sample-"}, name, "sample", spec)
    job["spec"] |= {
        "backoffLimit": 0,
        # Whoever asked for it deletes it; these are for the one that was killed.
        "activeDeadlineSeconds": _SAMPLE_S,
        "ttlSecondsAfterFinished": 60,
    }
    return job


def _check(name: str, image: str, cpu: str, memory: str) -> None:
    found: list[Found] = []
    if not rules.is_label(name):
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
        **restricted.container(),
        "volumeMounts": [*mounts, restricted.scratch_mount()],
    }


def _job(named: Object, instance: str, component: str, pod: Object) -> Object:
    pod["volumes"].append(restricted.scratch_volume())
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**named, "labels": labels(instance, component)},
        "spec": {
            "template": {
                "metadata": {"labels": labels(instance, component)},
                "spec": {
                    **restricted.pod(),
                    "restartPolicy": "Never",
                    # Its process is the container's first, which the kernel keeps from SIGTERM.
                    "terminationGracePeriodSeconds": 5,
                    **pod,
                },
            },
        },
    }
