"""From a JobSpec to Kubernetes objects: a pure function, the same bytes for the same job.

What each field does is the training operator's (v1.9) and torchrun's behaviour, and the reason
stands beside every value that needs one.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from gptddp import flags
from gptddp.k8s.objects import PRIORITY, QUEUE, Object
from gptddp.k8s.render import code_volume, companions, patch, pod, restricted, yaml_text
from gptddp.k8s.render.spec import RENDEZVOUS_PORT, JobSpec
from gptddp.launch.pod_facts import KEY

DATA, RUNS, SHM = "/data", "/runs", "/dev/shm"  # mount paths
ALIVE = restricted.SCRATCH + "/gptddp-alive"  # the launcher touches it
METRICS_PORT = 9464
SPEC_HASH = "gptddp/spec-hash"  # annotation


def objects(spec: JobSpec) -> list[Object]:
    """The objects of a resolved spec, in the order in which they are to be created.

    The last one is the PyTorchJob.
    """
    job = pytorchjob(spec)
    beside = companions.objects(job, _metrics_port(spec), spec.pod)
    return [*code_volume.objects(job, spec.code), *beside, job]


def pytorchjob(spec: JobSpec) -> Object:
    """The PyTorchJob of a resolved spec, with its patch and its hash."""
    job = _pytorchjob(spec)
    return stamp(job if spec.pod.patch is None else patch.apply(job, spec.pod.patch))


def spec_hash(job: Mapping[str, Any]) -> str:
    """SHA-256 (hex) over an object, whatever the order of its keys.

    Without its namespace: named by a flag or by kubectl's context, it is the same job.
    """
    metadata = {key: value for key, value in job["metadata"].items() if key != "namespace"}
    text = json.dumps(
        {**job, "metadata": metadata}, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    return hashlib.sha256(text.encode()).hexdigest()


to_yaml = yaml_text.dump


def to_json(documents: list[Object]) -> str:
    """One object as it is, several as a List, as kubectl does."""
    several = {"apiVersion": "v1", "kind": "List", "items": documents}
    return json.dumps(documents[0] if len(documents) == 1 else several, indent=2) + "\n"


def trainer_args(spec: JobSpec) -> list[str]:
    """The container's arguments: what was given, the paths in the pod, and the preset by name."""
    path = f"/{spec.data_path}" if spec.data_path else ""
    # The preset by name: the same manifest is to mean the same model wherever it runs. And without
    # --device a pod of a node whose CUDA does not work would train on its CPU, in silence.
    own = {"preset": "gpt2", "device": "cuda"} if spec.gpus > 0 else {"preset": "tiny"}
    places = {"data": DATA + path, "run_dir": f"{RUNS}/{spec.run_path}"}
    given = flags.given(spec.train)
    train = flags.to_args({**own, "metrics_port": METRICS_PORT, **given, **places})
    return [*code_volume.args(spec.code), *train]


def labels(name: str, component: str = "trainer") -> dict[str, str]:
    """The labels of everything that belongs to the job of this name."""
    return {
        "app.kubernetes.io/name": "gptddp",
        "app.kubernetes.io/instance": name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "gptddp",
        "app.kubernetes.io/managed-by": "gptddp-k8s",
    }


def stamp(job: Object) -> Object:
    """The job with its hash as an annotation and in the rendezvous id.

    The id is new for a changed job and the same for the same one: an id that was closed by one
    job must not be found by the next.
    """
    digest = spec_hash(job)
    job["metadata"].setdefault("annotations", {})[SPEC_HASH] = digest
    job["spec"]["elasticPolicy"]["rdzvId"] = f"{job['metadata']['name']}-{digest[:8]}"
    return job


def _pytorchjob(spec: JobSpec) -> Object:
    """Worker-only with elasticPolicy at any size: else the operator sets no rendezvous at all."""
    namespace = {"namespace": spec.namespace} if spec.namespace else {}
    # Kueue suspends a job with such a label when it is created.
    queued = {k: v for k, v in ((QUEUE, spec.queue), (PRIORITY, spec.priority)) if v is not None}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": spec.name, **namespace, "labels": {**labels(spec.name), **queued}},
        "spec": {
            "nprocPerNode": str(spec.nproc_per_node),  # a string in the API
            "elasticPolicy": {
                "minReplicas": spec.min,
                "maxReplicas": spec.max,
                "rdzvBackend": "c10d",
            },
            # The operator's default None would leave the other pods, and their GPUs, running.
            "runPolicy": {"cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": spec.replicas,
                    # The launcher's codes: 1 to 127 fail the job, from 128 on a new pod comes.
                    "restartPolicy": "ExitCode",
                    "template": {
                        "metadata": {
                            "labels": labels(spec.name),
                            "annotations": _annotations(spec),
                        },
                        "spec": _pod_spec(spec),
                    },
                }
            },
        },
    }


def _annotations(spec: JobSpec) -> Object:
    """The pods': for a Prometheus without its operator, and for Kueue.

    All pods have the same port, and rank 0 alone answers there.
    """
    port = _metrics_port(spec)
    scraping = {"prometheus.io/scrape": "true", "prometheus.io/port": str(port)} if port else {}
    kind, _, label = (spec.topology or "").partition("=")
    wish = {f"kueue.x-k8s.io/podset-{kind}-topology": label or "true"} if kind else {}
    return {**scraping, **wish}


def _metrics_port(spec: JobSpec) -> int:
    """0: none, where the user wants none."""
    given: int | None = spec.train.metrics_port
    return METRICS_PORT if given is None else given


def _pod_spec(spec: JobSpec) -> Object:
    """A pod that the `restricted` Pod Security Standard admits."""
    devices = [*([spec.gpu_resource] if spec.gpus > 0 else []), *pod.devices(spec.pod)]
    return {
        **pod.account(spec.pod, own=spec.name),
        **restricted.pod_fields(),
        **pod.scheduling(spec.pod),
        "terminationGracePeriodSeconds": spec.grace_s,
        "tolerations": [
            *(
                {
                    "key": f"node.kubernetes.io/{condition}",
                    "operator": "Exists",
                    "effect": "NoExecute",
                    "tolerationSeconds": 10,  # the default of 300 would be the recovery time
                }
                for condition in ("not-ready", "unreachable")
            ),
            *pod.tolerations(spec.pod, devices),
        ],
        "containers": [_container(spec)],
        "volumes": [
            restricted.claim_volume("data", spec.claim),
            # The kubelet waits for ever for the second of two volumes of one claim.
            *([restricted.claim_volume("runs", spec.runs_claim)] if _runs(spec) == "runs" else []),
            restricted.scratch_volume(),
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": spec.shm}},
            *code_volume.volumes(spec.name, spec.code),
        ],
    }


def _runs(spec: JobSpec) -> str:
    """The volume with the runs: that of the data where both are in one claim."""
    return "data" if spec.runs_claim == spec.claim else "runs"


def _container(spec: JobSpec) -> Object:
    """The operator wants it named `pytorch`; its entrypoint is the image's."""
    port = _metrics_port(spec)
    gpus = {spec.gpu_resource: str(spec.gpus)} if spec.gpus > 0 else {}
    resources = {"cpu": spec.cpu, "memory": spec.memory, **gpus, **dict(spec.pod.resource)}
    return {
        "name": "pytorch",
        "image": spec.image,
        "args": trainer_args(spec),
        # The operator appends its own PET_* after these.
        "env": [
            *own_env(spec),
            *({"name": name, "value": value} for name, value in spec.env),
            *pod.env(spec.pod),
        ],
        **pod.env_from(spec.pod),
        "ports": [  # every one named: the operator copies them into a Service
            {"name": "pytorchjob-port", "containerPort": RENDEZVOUS_PORT},
            *(  # each worker of the pod has a launcher, with a port of its own
                {"name": f"launcher-{i}", "containerPort": RENDEZVOUS_PORT + i}
                for i in range(1, spec.nproc_per_node or 1)
            ),
            *([{"name": "metrics", "containerPort": port}] if port else []),
        ],
        "resources": {"requests": resources, "limits": dict(resources)},
        "livenessProbe": _liveness(spec),
        **restricted.container_fields(),
        "volumeMounts": [
            {"name": "data", "mountPath": DATA, "readOnly": True},
            {"name": _runs(spec), "mountPath": RUNS},
            restricted.scratch_mount(),
            {"name": "shm", "mountPath": SHM},
            *code_volume.mounts(spec.code),
        ],
    }


def _liveness(spec: JobSpec) -> Object:
    """The container is started again when its launcher hangs; it sees to the workers itself.

    The launcher touches the file every second, while it waits for peers too. Its loop stands still
    for a grace period at most, when it ends its workers. No file, as before the loop has begun,
    and no `find` in the image: nothing is wrong.
    """
    minutes = 5 + -(-spec.grace_s // 60)
    return {
        "exec": {
            "command": ["sh", "-c", f'! find "$GPTDDP_ALIVE" -mmin +{minutes} | grep -q .'],
        },
        "periodSeconds": 60,
        "timeoutSeconds": 30,  # of a busy node
        "failureThreshold": 3,
    }


def own_env(spec: JobSpec) -> list[Object]:
    """The variables of the launcher, which nobody else may set."""
    ours = {
        "GPTDDP_ALIVE": ALIVE,
        "GPTDDP_GRACE_S": str(spec.grace_s),
        **restricted.scratch_env(),
    }
    name = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    key = {"name": KEY, "valueFrom": companions.secret_ref(spec.name)}
    return [name, key, *({"name": k, "value": v} for k, v in ours.items())]
