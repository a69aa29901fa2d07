"""Refuses jobs that a cluster would accept, and that would then hang, lose work or waste resources.

The rules check the PyTorchJob to be submitted, patch included, and the user's options if needed.
Problems that the API server reports itself, also in dry runs, have no rule here.
"""

import re
from collections.abc import Callable, Iterator

from gptddp import config
from gptddp.advice import advice
from gptddp.flags import did_you_mean
from gptddp.k8s.objects import (
    QUEUE,
    Object,
    replica_specs,
    volume_claims,
    worker_pod_spec,
    worker_spec,
)
from gptddp.k8s.render import manifest, patch, quantity, variables
from gptddp.k8s.render.problem import Problem
from gptddp.k8s.render.problem import refuse as refuse  # exported with the rules
from gptddp.k8s.render.spec import JobSpec, flag, memory_of

Found = tuple[str, str, str]  # field, rule, fix
Rule = Callable[[JobSpec, Object], Iterator[Found]]

_WORKER = "spec.pytorchReplicaSpecs.Worker"
_POD = f"{_WORKER}.template.spec"
_CONTAINER = f"{_POD}.containers[pytorch]"
_GPU = r".+/gpu|nvidia\.com/mig-.+"
_SLICE = r"nvidia\.com/mig-.+"
_LEAST_GRACE_S = 10
# Fields that the API accepts as free text: the values that the operator and torchrun know.
_WORDS = {
    f"{_WORKER}.restartPolicy": ("ExitCode", "OnFailure", "Always", "Never"),
    "spec.runPolicy.cleanPodPolicy": ("Running", "None", "All"),
    "spec.elasticPolicy.rdzvBackend": ("c10d", "etcd", "etcd-v2"),
}
_ELASTIC_JOB = "kueue.x-k8s.io/elastic-job"  # annotation


def check(spec: JobSpec, job: Object) -> list[Problem]:
    """Every rule broken by a resolved spec and its rendered PyTorchJob."""
    found: list[Problem] = []
    for id, rule in RULES.items():
        try:
            found += [Problem(id, *it) for it in rule(spec, job)]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            what = f"with it the job is no PyTorchJob ({type(error).__name__}: {error})"
            return [Problem("shape", "--patch", what, "compare it with `render` without --patch")]
    return found


# -- names and numbers of pods -------------------------------------------------------------------


def _name(spec: JobSpec, job: Object) -> Iterator[Found]:
    """Pod names have at most 63 characters, or the operator fails on their Services."""
    last = f"{spec.name}-worker-{max(spec.replicas, spec.max or 0, 1) - 1}"
    if len(last) > 63:
        yield (
            "--name",
            f"the last pod's name {last} has {len(last)} characters, and may have at most 63",
            f"use at most {63 - len(last) + len(spec.name)} characters",
        )


def _roles(spec: JobSpec, job: Object) -> Iterator[Found]:
    """A job has only the entry Worker."""
    for role in replica_specs(job):
        if role != "Worker":
            fix = "did you mean Worker? It is the only entry"
            yield f"spec.pytorchReplicaSpecs.{role}", f"{role!r} is no entry of this job", fix


def _pods(spec: JobSpec, job: Object) -> Iterator[Found]:
    """1 <= min <= replicas <= max; otherwise the pods would wait."""
    low, count, high, nproc = spec.min or 0, spec.replicas, spec.max or 0, spec.nproc_per_node or 0
    some = f"use --min 1 to {count}" if count > 1 else "use --min 1"
    if count < 1:
        yield "--replicas", f"{count} is less than 1", "use --replicas 1 or more"
    elif not 1 <= low <= count:
        than = "is less than 1" if low < 1 else f"is above --replicas {count}"
        yield "--min", f"{low} {than}", some
    elif high < count:
        fix = f"use --max {count} or more, or fewer --replicas"
        yield "--max", f"{high} is less than --replicas {count}", fix
    if nproc < 1:
        yield "--nproc-per-node", f"{nproc} is less than 1", "use 1 or more, or leave it out"


def _world_size(spec: JobSpec, job: Object) -> Iterator[Found]:
    """At most `--lanes` processes: each needs its own lane, a stream of rows."""
    lanes = config.with_preset(spec.train, accelerator=spec.gpus > 0).lanes
    pods, nproc = spec.max or 0, spec.nproc_per_node or 0
    if min(pods, nproc) < 1 or pods * nproc <= lanes:
        return
    if nproc > lanes:
        option = "--gpus" if nproc == spec.gpus else "--nproc-per-node"
        fewer = f"use {option} {lanes} or less"
    else:
        option = "--max" if pods > spec.replicas else "--replicas"
        fewer = f"use {option} {lanes // nproc} or less"
    more = f"-- --lanes {pods * nproc}"
    if (batch := spec.train.batch) and batch % (pods * nproc):
        more += f" --batch {-(-batch // (pods * nproc)) * pods * nproc}"
    product = f" ({pods} pods of {nproc})" if min(pods, nproc) > 1 else ""
    rule = f"{pods * nproc} workers{product} but only {lanes} lanes: every worker needs one"
    yield option, rule, f"{fewer}, or give a new run more lanes: {more}"


# -- the pods ------------------------------------------------------------------------------------


def _gpus(spec: JobSpec, job: Object) -> Iterator[Found]:
    """Each process has its own GPU, and `--gpus` counts all GPUs of a pod."""
    limits = (_container(job).get("resources") or {}).get("limits") or {}
    nproc, count = spec.nproc_per_node or 1, quantity.number(limits.get(spec.gpu_resource))
    if spec.gpus < 0:
        yield "--gpus", f"{spec.gpus} is negative", "use 0 or more"
    if spec.train.device == "cuda" and spec.gpus < 1:
        yield "--device cuda", "the pods have no GPU", "add --gpus 1"
    if 0 < spec.gpus < nproc:
        rule = f"{nproc} processes share {spec.gpus} GPUs"
        fix = f"use --nproc-per-node {spec.gpus} or less: NCCL needs a GPU for each"
        yield "--nproc-per-node", rule, fix
    if spec.gpus > 1 and re.fullmatch(_SLICE, spec.gpu_resource):
        yield (
            "--gpus",
            f"a pod cannot train on {spec.gpus} slices: CUDA shows a process one of them, and NCCL"
            " allows no two processes of a host on one GPU",
            f"use --gpus 1 --replicas {spec.gpus * max(1, spec.replicas)}: one slice per pod",
        )
    for name in limits:
        if re.fullmatch(_GPU, name) and (name != spec.gpu_resource or count != spec.gpus):
            rule = f"a pod has {limits[name]}, and the job would use {spec.gpus}"
            fix = f"use --gpus N --gpu-resource {name}"
            yield f"{_CONTAINER}.resources.limits[{name}]", rule, fix


def _memory(spec: JobSpec, job: Object) -> Iterator[Found]:
    """A pod has more memory than /dev/shm, which counts against it."""
    limits = (_container(job).get("resources") or {}).get("limits") or {}
    volumes = {it["name"]: it for it in worker_pod_spec(job).get("volumes") or []}
    shm = (volumes.get("shm", {}).get("emptyDir") or {}).get("sizeLimit")
    if 0 < quantity.number(limits.get("memory")) <= quantity.number(shm):
        rule = f"{limits['memory']} is not more than --shm {shm}"
        yield "--memory", rule, "raise it: files in /dev/shm count against the pod's memory"


def _grace(spec: JobSpec, job: Object) -> Iterator[Found]:
    """From SIGTERM to SIGKILL, pods have `--grace-s` (at least 10 s) for a checkpoint."""
    seconds = int(worker_pod_spec(job).get("terminationGracePeriodSeconds", 30))
    least = max(_LEAST_GRACE_S, spec.grace_s)
    if seconds < least:
        rule = f"{seconds} s is not enough to commit a checkpoint"
        yield f"{_POD}.terminationGracePeriodSeconds", rule, f"use --grace-s {least} or more"


def _places(spec: JobSpec, job: Object) -> Iterator[Found]:
    """After `--` there is no `--data` or `--run-dir`; `--init-from` is a path in the pods."""
    if spec.train.data:
        fix = "name its claim before the --, as --data CLAIM/PATH, or `data` under [job]"
        yield "--data after --", "the job mounts the dataset itself", fix
    if spec.train.run_dir:
        fix = "use --name to name the job and its run, and --runs for the claim"
        yield "--run-dir after --", "the job's run directory is /runs/<name>", fix
    path = spec.train.init_from or ""
    roots = "/" if spec.pod.patch else ("/data/", "/runs/")
    if path and (not path.startswith(roots) or ".." in path.split("/")):
        rule = "the pods have the claim of --data at /data, and the claim of --runs at /runs"
        fix = "put the folder into one of them, and use its path there, as in /data/models/gpt2"
        yield f"--init-from {path} after --", rule, fix


def _environment(spec: JobSpec, job: Object) -> Iterator[Found]:
    """You set no variable of the operator or launcher; a manifest has no secret."""
    ours, there = manifest.own_env(spec), _container(job).get("env") or []
    leave = "leave it out: it would be overridden, or break the rendezvous"
    for item in there:
        if variables.is_reserved(item["name"]) and item not in ours:
            yield f"variable {item['name']}", "the operator or the launcher sets it", leave
    for item in ours:
        if item["name"] not in {it["name"] for it in there}:
            yield f"variable {item['name']}", "the launcher needs it", "keep it"
    pod = worker_pod_spec(job)
    parts = [*(pod.get("initContainers") or []), *pod["containers"]]
    for item in (item for part in parts for item in part.get("env") or []):
        name = item["name"]
        if "value" in item and variables.is_secret(name, str(item["value"])):
            rule = "looks like a secret, which anyone may read in a manifest"
            fix = f"put it into a Secret and use --env-from-secret {name}=SECRET/KEY"
            yield f"variable {name}", rule, fix


def _containers(spec: JobSpec, job: Object) -> Iterator[Found]:
    """A container has an image, and ports with different names and numbers."""
    for container in worker_pod_spec(job)["containers"]:
        where = f"{_POD}.containers[{container.get('name')}]"
        if not container.get("image"):
            near = did_you_mean(str(container.get("name")), ["pytorch"])
            yield where, f"it has no image{near}", "name a container of the job, or add an image"
        ports = container.get("ports") or []
        for key in ("name", "containerPort"):
            seen = [(port.get(key), port.get("protocol", "TCP")) for port in ports]
            if len(set(seen)) < len(seen) or None in [value for value, _ in seen]:
                rule = f"two ports share a {key}, or one has none, which breaks the job's Service"
                yield f"{where}.ports", rule, "give each its own (-- --metrics-port)"


def _claims(spec: JobSpec, job: Object) -> Iterator[Found]:
    """A claim is in only one volume, or the pod hangs; the runs volume is shared and writable."""
    found = list(volume_claims(worker_pod_spec(job)))
    for number, (name, claim) in enumerate(found):
        first = next((one for one, other in found[:number] if other == claim), None)
        if first is not None:
            rule = f"the claim {claim} is in the volume {first} already, and the pod would hang"
            yield f"{_POD}.volumes[{name}]", rule, f"leave it out, and mount {first} twice"
    volumes = {it["name"]: it for it in worker_pod_spec(job).get("volumes") or []}
    mounts = {it["mountPath"]: it for it in _container(job).get("volumeMounts") or []}
    mount = mounts.get(manifest.RUNS, {})
    volume = volumes.get(mount.get("name"), {})
    if mount.get("readOnly") or (volume.get("persistentVolumeClaim") or {}).get("readOnly"):
        fix = "leave readOnly out, or give data and runs a claim each"
        field = f"{_POD}.volumes[{mount['name']}]"
        yield field, "it is read-only, and the pods write the run to it", fix
    elif not mount or "emptyDir" in volume:
        fix = "mount a volume that all pods share, as --runs does"
        yield f"{_CONTAINER}.volumeMounts[{manifest.RUNS}]", "the run is lost with its pod", fix


def _dns(spec: JobSpec, job: Object) -> Iterator[Found]:
    """The pods use the cluster's DNS, or they never find each other."""
    pod = worker_pod_spec(job)
    host, policy = pod.get("hostNetwork"), pod.get("dnsPolicy", "ClusterFirst")
    if policy == "Default" or (host and policy == "ClusterFirst"):
        rule = "the pods would use the node's DNS, which does not know their names"
        fix = "use ClusterFirstWithHostNet" if host else "leave it out"
        yield f"{_POD}.dnsPolicy", rule, fix


# -- the operator and Kueue ----------------------------------------------------------------------


def _words(spec: JobSpec, job: Object) -> Iterator[Found]:
    """`restartPolicy`, `cleanPodPolicy` and `elasticPolicy` have values that work."""
    policy = job["spec"].get("elasticPolicy") or {}
    for field, words in _WORDS.items():
        if (value := patch.value_at(job, field)) not in (None, *words):
            yield field, f"{value!r} is unknown", f"use {' or '.join(words)}"
    if policy.get("rdzvConf") == []:
        rule = "an empty list makes the operator panic"
        yield "spec.elasticPolicy.rdzvConf", rule, "leave it out or fill it"
    if policy.get("standalone"):
        rule = "torchrun fails on the value that the operator makes of it"
        yield "spec.elasticPolicy.standalone", rule, "leave it out"


def _queue(spec: JobSpec, job: Object) -> Iterator[Found]:
    """`--priority` and `--topology` need `--queue`; a queued job has no HorizontalPodAutoscaler."""
    labels = job["metadata"].get("labels") or {}
    for option in ("priority", "topology"):
        if getattr(spec, option) is not None and QUEUE not in labels:
            fix = "add --queue NAME; `kubectl get localqueues` lists them"
            yield f"--{option}", "it is for Kueue, and the job is in no queue", fix
    if QUEUE in ((worker_spec(job)["template"].get("metadata") or {}).get("labels") or {}):
        rule = "Kueue would queue each pod separately"
        yield f"{_WORKER}.template.metadata.labels[{QUEUE}]", rule, "use --queue"
    if _ELASTIC_JOB in (job["metadata"].get("annotations") or {}):
        rule = "Kueue scales batch Jobs and Ray's kinds in place, but not PyTorchJobs"
        yield f"metadata.annotations[{_ELASTIC_JOB}]", rule, "leave it out"
    if QUEUE in labels and (job["spec"].get("elasticPolicy") or {}).get("metrics"):
        rule = "an autoscaler would change the number of pods, and Kueue stops the job each time"
        yield "spec.elasticPolicy.metrics", rule, "leave it out, or --queue"


def _container(job: Object) -> Object:
    """The container of the trainer, which a patch cannot remove."""
    return next(it for it in worker_pod_spec(job)["containers"] if it.get("name") == "pytorch")


RULES: dict[str, Rule] = {
    "name": _name,
    "roles": _roles,
    "pods": _pods,
    "world-size": _world_size,
    "gpus": _gpus,
    "memory": _memory,
    "grace": _grace,
    "places": _places,
    "environment": _environment,
    "containers": _containers,
    "claims": _claims,
    "dns": _dns,
    "words": _words,
    "queue": _queue,
}


def warnings(spec: JobSpec) -> list[str]:
    """Settings that are allowed but seldom intended; one line each."""
    notes = []
    last = spec.image.rpartition("/")[2]
    if "@" not in last and (":" not in last or last.endswith(":latest")):
        notes.append(f"--image {spec.image} has no fixed tag: pods may run different code")
    if spec.gpus > 0 and spec.train.device == "cpu":
        notes.append("--device cpu leaves the pods' GPUs idle")
    nproc = max(1, spec.nproc_per_node or 1)
    memory = memory_of(spec, nproc, spec.shm)
    if quantity.number(spec.memory) < quantity.number(memory):
        who = f"{nproc} processes" if nproc > 1 else "a process"
        notes.append(
            f"--memory {spec.memory} is less than the {memory} that {who} of this model may need: "
            f"the pods may be killed for it; use {flag('memory')} {memory}, or leave it out"
        )
    settings = config.with_preset(spec.train, accelerator=spec.gpus > 0)
    return notes + advice(settings, spec.replicas * nproc)
