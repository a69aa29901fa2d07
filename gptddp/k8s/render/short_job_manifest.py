"""Manifests of the short Jobs of `prepare` and `sample`: a worker's pod with another program.

The pod comes from a PyTorchJob's template, so that the cluster admits and places it like a worker.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gptddp.errors import ConfigError
from gptddp.k8s.exit_codes import BAD_INPUT
from gptddp.k8s.objects import Object, argument, claim_at, worker_spec
from gptddp.k8s.render import code_volume, forms, manifest, patch, pod, rules, spec
from gptddp.k8s.render.manifest import DATA, RUNS, SHM, SPEC_HASH, labels
from gptddp.k8s.render.spec import JobSpec

SOURCE = "/source"  # mount path
_PREPARE_KEPT_S = 24 * 3600  # how long a finished `prepare` stays, with its log
_SAMPLE_LIMIT_S = 900  # time limit of a `sample`, its start included
# stdout is the sample; stderr becomes the container's termination message.
_QUIET = 'exec "$@" 2>/dev/termination-log'
_OF_TRAINING = r"(training\.kubeflow\.org|kueue\.x-k8s\.io|prometheus\.io)/.*"  # labels etc.
_VARIABLES = r"POD_NAME|GPTDDP_.*|TORCH_.*"  # the launcher's


def prepare_job(stated: JobSpec, source: str, options: Sequence[str]) -> Object:
    """The Job that runs `gptddp prepare SOURCE --out DATA OPTIONS`. Raises ConfigError.

    stated: its name, image, CPUs, memory, dataset and pod options; source: CLAIM or CLAIM/PATH.
    """
    template = _template_of(stated)
    rules.refuse(forms.CLAIM.problems("--source", source))
    claim, _, path = source.rstrip("/").partition("/")
    one = claim == stated.claim  # mounted once, so that `prepare` sees overlapping folders
    if one and f"{path}/".startswith(f"{stated.data_path}/" if stated.data_path else ""):
        raise ConfigError(
            f"--source {source} is inside --data {stated.data}: prepare into a separate folder, as "
            f"in --data {claim}/dataset, and use the same --data for `submit`"
        )
    claims = {DATA: manifest.claim_volume("data", stated.claim)}
    claims |= {} if one else {SOURCE: manifest.claim_volume("source", claim, True)}
    job = _job(template, stated.name, "prepare", claims, writable=DATA)
    texts, out = f"{DATA if one else SOURCE}/{path}", f"{DATA}/{stated.data_path}"
    amounts: Object = {"cpu": stated.cpu, "memory": stated.memory}
    job["spec"]["template"]["spec"]["containers"][0] |= {
        "command": ["gptddp", "prepare", texts.rstrip("/"), "--out", out.rstrip("/"), *options],
        "resources": {"requests": amounts, "limits": dict(amounts)},
    }
    # A wrong option or source stays wrong; a drained node does not count as a failure.
    wrong = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [BAD_INPUT]}}
    drained = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    job["spec"] |= {
        "backoffLimit": 3,
        "podFailurePolicy": {"rules": [wrong, drained]},
        "ttlSecondsAfterFinished": _PREPARE_KEPT_S,
    }
    job["metadata"]["name"] = stated.name
    job["metadata"]["annotations"] = {SPEC_HASH: manifest.spec_hash(job)}
    return job


def sample_job(
    live: Object | None, stated: JobSpec, options: Sequence[str], given: Mapping[str, Any]
) -> Object:
    """The Job that runs `gptddp sample` on the run of a job, with its code. Raises ConfigError.

    live: the PyTorchJob, None if it is gone; given: image, memory, data and runs that replace the
    job's; stated: the settings if the job is gone, and the pod options.
    """
    stated = replace(stated, **{key: value for key, value in given.items() if value})
    if live and stated.pod.patch:
        live = patch.apply(live, stated.pod.patch)
    template = worker_spec(live)["template"] if live else _template_of(stated)
    theirs, name = template["spec"], stated.name
    data, runs = claim_at(theirs, DATA), claim_at(theirs, RUNS)
    if not (data and runs):
        raise ConfigError(f"the PyTorchJob {name} has no volumes data and runs: is it gptddp's?")
    run = argument(theirs, "--run-dir").removeprefix(f"{RUNS}/") or name
    if given["runs"]:
        runs, run = stated.runs_claim, stated.run_path
    data = stated.claim if given["data"] else data
    pvc = {(it.get("persistentVolumeClaim") or {}).get("claimName"): it for it in theirs["volumes"]}
    claims = {DATA: pvc.get(data) or manifest.claim_volume("data", data)}
    claims[RUNS] = claims[DATA] if runs == data else manifest.claim_volume("runs", runs)
    job = _job(template, name, "sample", claims)
    own = job["spec"]["template"]["spec"]
    own |= {**pod.account(stated.pod, own=None), **pod.scheduling(stated.pod)}
    own["tolerations"] = [*own.get("tolerations", []), *pod.tolerations(stated.pod, devices=[])]
    words = [*code_volume.before_command(theirs), "gptddp", "sample", f"{RUNS}/{run}", *options]
    container = own["containers"][0]
    memory = given["memory"] or container["resources"].get("limits", {}).get("memory", "4Gi")
    container |= {
        "image": given["image"] or container["image"],
        "command": ["sh", "-c", _QUIET, "sh", *words],
        "resources": {  # small requests, to fit beside a running job
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"cpu": "1", "memory": memory},
        },
        "env": [*container["env"], *pod.env(stated.pod)],
    }
    job["spec"] |= {
        "backoffLimit": 0,
        # `sample` deletes its Job; these limits are for a `sample` that was killed.
        "activeDeadlineSeconds": _SAMPLE_LIMIT_S,
        "ttlSecondsAfterFinished": 60,
    }
    job["metadata"]["generateName"] = f"{name[:40]}-sample-"
    return job


def _template_of(stated: JobSpec) -> Object:
    """The pod template of a PyTorchJob with the relevant settings of `stated`."""
    plain = JobSpec(
        name=stated.name,
        image=stated.image,
        cpu=stated.cpu or "1",
        memory=stated.memory or "4Gi",
        data=stated.data,
        runs=stated.runs,
        pod=stated.pod,
    )
    rules.refuse(forms.problems(vars(plain)))
    resolved = spec.resolve(plain)
    job = manifest.pytorchjob(resolved)
    rules.refuse(rules.check(resolved, job))
    template: Object = worker_spec(job)["template"]
    return template


def _job(
    template: Object, name: str, component: str, claims: Mapping[str, Object], writable: str = ""
) -> Object:
    """A Job with a pod of the template and these volumes, by mount path.

    The caller adds name, command, resources and limits.
    """
    theirs, ours = copy.deepcopy(template["spec"]), labels(name, component)
    if theirs.get("serviceAccountName") == name:  # it is deleted with the job
        del theirs["serviceAccountName"]
    for field in ("initContainers", "schedulingGates", "topologySpreadConstraints"):
        theirs.pop(field, None)
    container = theirs["containers"][0]
    for field in ("args", "ports", "livenessProbe", "startupProbe", "lifecycle"):
        container.pop(field, None)
    mounts = [
        {"name": it["name"], "mountPath": path, **({} if path == writable else {"readOnly": True})}
        for path, it in claims.items()
    ]
    mounts += [
        it for it in container.get("volumeMounts", []) if it["mountPath"] not in (DATA, RUNS, SHM)
    ]
    volumes = {it["name"]: it for it in [*theirs["volumes"], *claims.values()]}
    variables = [it for it in container.get("env", []) if not re.fullmatch(_VARIABLES, it["name"])]
    container |= {"name": component, "env": variables, "volumeMounts": mounts}
    pod_spec = {
        **theirs,
        "restartPolicy": "Never",
        # Its process has pid 1, to which the kernel does not deliver SIGTERM.
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
        "volumes": [volumes[it] for it in dict.fromkeys(mount["name"] for mount in mounts)],
    }
    found = template.get("metadata", {})
    kept = {field: _beside_training(found.get(field)) for field in ("labels", "annotations")}
    meta = {"labels": {**kept["labels"], **ours}, "annotations": kept["annotations"]}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"labels": dict(ours)},
        "spec": {"template": {"metadata": meta, "spec": pod_spec}},
    }


def _beside_training(found: Mapping[str, str] | None) -> dict[str, str]:
    """Labels or annotations without the operator's, Kueue's and Prometheus'."""
    return {k: v for k, v in (found or {}).items() if not re.fullmatch(_OF_TRAINING, k)}
