"""The short Jobs of `prepare` and `sample`: pure functions from options to a Kubernetes object."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gptddp.errors import ConfigError
from gptddp.k8s.exit_codes import BAD_INPUT
from gptddp.k8s.objects import Object
from gptddp.k8s.render import code_volume, forms, manifest, patch, pod, restricted
from gptddp.k8s.render.manifest import DATA, RUNS, SPEC_HASH, labels
from gptddp.k8s.render.pod import PodOptions
from gptddp.k8s.render.problem import refuse

SOURCE = "/source"  # mount path
_PREPARE_KEPT_S = 24 * 3600  # a finished `prepare`, with its log
_SAMPLE_LIMIT_S = 900  # the longest that a `sample` may take, its start included
# Standard output is the sample; standard error becomes the pod's status message.
_QUIET = 'exec "$@" 2>/dev/termination-log'
PLACEMENT = (
    "imagePullSecrets", "nodeSelector", "affinity", "tolerations", "runtimeClassName",
    "priorityClassName",
)  # fmt: skip
_NOT_COPIED = r"training\.kubeflow\.org/.*|kueue\.x-k8s\.io/.*|prometheus\.io/.*"


@dataclass(frozen=True)
class ClaimPath:
    """A claim, and a path inside it: `CLAIM` or `CLAIM/PATH`."""

    claim: str
    path: str = ""

    @classmethod
    def parse(cls, flag: str, text: str) -> "ClaimPath":
        """Raises ConfigError where there is no claim's name, or the path leaves the claim."""
        refuse(forms.CLAIM.problems(flag, text))
        claim, _, path = text.partition("/")
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
    read_only_source: bool = False,
    asked: PodOptions = pod.NOTHING,
) -> Object:
    """The Job that runs `gptddp prepare SOURCE --out DATA OPTIONS` in a pod.

    `asked`: what the cluster asks of pods.
    """
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
        volumes.append(restricted.claim_volume("source", source.claim, read_only_source))
        mounts.append({"name": "source", "mountPath": SOURCE, "readOnly": True})
    command = ["gptddp", "prepare", prepare_source(source, data), "--out", data.at(DATA)]
    resources = {"cpu": cpu, "memory": memory}
    container = _container("prepare", image, [*command, *options], mounts)
    container["resources"] = {"requests": resources, "limits": dict(resources)}
    spec = {"containers": [container], "volumes": volumes}
    job = _job({"name": name}, name, "prepare", spec, asked)
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
    run: str,
    template: Mapping[str, Object],
    asked: PodOptions = pod.NOTHING,
) -> Object:
    """The Job that runs `gptddp sample` on a run of the job of this name.

    `data` and `runs` are claims; `run`: the path of the run in `runs`.

    Its pod can run where those of the job's `template` can, but for what is `asked` of it; the
    template is empty where the job is gone.
    """
    _check(name, image, "1", memory)
    worker = template.get("spec", {})
    read_only = ("data", data) in _read_only_claims(worker)
    volumes = [restricted.claim_volume("data", data, read_only)]
    if runs != data:
        volumes.append(restricted.claim_volume("runs", runs))
    mounts: list[Object] = [
        {"name": "data", "mountPath": DATA, "readOnly": True},  # the tokenizer
        {"name": volumes[-1]["name"], "mountPath": RUNS, "readOnly": True},
    ]
    on_code, code_volumes, code_mounts = code_volume.of_pods(worker)
    volumes, mounts = [*volumes, *code_volumes], [*mounts, *code_mounts]
    program = [*on_code, "gptddp", "sample"]
    command = ["sh", "-c", _QUIET, "sh", *program, f"{RUNS}/{run}", *options]
    container = _container("sample", image, command, mounts)
    container["resources"] = {  # asks for little, to fit in beside a running job
        "requests": {"cpu": "100m", "memory": "256Mi"},
        "limits": {"cpu": "1", "memory": memory},
    }
    spec = {"containers": [container], "volumes": volumes}
    job = _job({"generateName": f"{name[:40]}-sample-"}, name, "sample", spec, asked)
    _follow(job, name, template)
    job["spec"] |= {
        "backoffLimit": 0,
        # `sample` deletes its Job; these are for a `sample` that was killed.
        "activeDeadlineSeconds": _SAMPLE_LIMIT_S,
        "ttlSecondsAfterFinished": 60,
    }
    return job


def _check(name: str, image: str, cpu: str, memory: str) -> None:
    refuse(
        found
        for form, flag, text in (
            (forms.LABEL, "--name", name),
            (forms.IMAGE, "--image", image),
            (forms.CPUS, "--cpu", cpu),
            (forms.BYTES, "--memory", memory),
        )
        for found in form.problems(flag, text)
    )


def _container(name: str, image: str, command: list[str], mounts: list[Object]) -> Object:
    return {
        "name": name,
        "image": image,
        "command": command,
        "env": [{"name": k, "value": v} for k, v in restricted.scratch_env().items()],
        **restricted.container_fields(),
        "volumeMounts": [*mounts, restricted.scratch_mount()],
    }


def _read_only_claims(pod_spec: Mapping[str, Any]) -> set[tuple[str, str]]:
    """(volume, claim) of those that are mounted read-only on their node."""
    found = ((v["name"], v.get("persistentVolumeClaim")) for v in pod_spec.get("volumes", []))
    return {(name, of["claimName"]) for name, of in found if of and of.get("readOnly")}


def _follow(job: Object, name: str, template: Mapping[str, Any]) -> None:
    """Give a Job what the cluster asks of the pods of the PyTorchJob of this name as well.

    What the Job has already stands: it was asked of the Job itself.
    """
    own, theirs = job["spec"]["template"], template.get("spec", {})
    for key in PLACEMENT:
        if key in theirs:
            own["spec"].setdefault(key, theirs[key])
    account = theirs.get("serviceAccountName")
    if account and account != name:  # the job's own may go with the job before the sample ends
        own["spec"].setdefault("serviceAccountName", account)
    context = theirs.get("securityContext", {})
    if theirs and "fsGroup" not in context:
        for key in ("fsGroup", "fsGroupChangePolicy"):
            own["spec"]["securityContext"].pop(key, None)
    for field in ("labels", "annotations"):
        found = template.get("metadata", {}).get(field) or {}
        found = {k: v for k, v in found.items() if not re.fullmatch(_NOT_COPIED, k)}
        if found:
            own["metadata"][field] = {**found, **own["metadata"].get(field, {})}


def _job(
    named: Object, instance: str, component: str, pod_spec: Object, asked: PodOptions
) -> Object:
    ours = labels(instance, component)
    container = pod_spec["containers"][0]
    container["env"] += pod.env(asked)
    container |= pod.env_from(asked)
    pod_spec["volumes"].append(restricted.scratch_volume())
    tolerated = pod.tolerations(asked, devices=[])
    template: Object = {
        "metadata": {"labels": dict(ours)},
        "spec": {
            **pod.account(asked, own=None),
            **restricted.pod_fields(),
            **pod.scheduling(asked),
            **({"tolerations": tolerated} if tolerated else {}),
            "restartPolicy": "Never",
            # Its process is the container's first, which the kernel keeps from SIGTERM.
            "terminationGracePeriodSeconds": 5,
            **pod_spec,
        },
    }
    if asked.patch is not None:
        template = patch.apply_to_pod(template, asked.patch)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**named, "labels": ours},
        "spec": {"template": template},
    }
