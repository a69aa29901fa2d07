"""Renders a JobSpec as Kubernetes objects: a pure function, the same bytes for the same job.

The training operator (v1.9) and torchrun define what each field does. A comment gives the reason of
every value that needs one.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from gptddp import flags
from gptddp.k8s.objects import PRIORITY, QUEUE, Object
from gptddp.k8s.render import code_volume, companions, patch, pod, yaml_text
from gptddp.k8s.render.spec import RENDEZVOUS_PORT, JobSpec
from gptddp.launch.pod_facts import KEY

DATA, RUNS, SHM = "/data", "/runs", "/dev/shm"  # mount paths
SCRATCH = "/tmp"  # mount path of the one writable folder under a read-only root
ALIVE = SCRATCH + "/gptddp-alive"  # the launcher touches it
METRICS_PORT = 9464
SPEC_HASH = "gptddp/spec-hash"  # annotation


def objects(spec: JobSpec) -> list[Object]:
    """The objects of a resolved spec, in the order in which to create them; the PyTorchJob last."""
    job = pytorchjob(spec)
    beside = companions.objects(job, _metrics_port(spec), spec.pod)
    return [*code_volume.objects(job, spec.code), *beside, job]


def pytorchjob(spec: JobSpec) -> Object:
    """The PyTorchJob of a resolved spec, with its patch and its hash."""
    job = _pytorchjob(spec)
    return stamp(job if spec.pod.patch is None else patch.apply(job, spec.pod.patch))


def spec_hash(job: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of an object, independent of the order of its keys.

    Without the namespace: the job is the same whether a flag or kubectl's context names it.
    """
    metadata = {key: value for key, value in job["metadata"].items() if key != "namespace"}
    text = json.dumps(
        {**job, "metadata": metadata}, sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    return hashlib.sha256(text.encode()).hexdigest()


to_yaml = yaml_text.dump


def to_json(documents: list[Object]) -> str:
    """One object by itself, several as a List, like kubectl."""
    several = {"apiVersion": "v1", "kind": "List", "items": documents}
    return json.dumps(documents[0] if len(documents) == 1 else several, indent=2) + "\n"


def trainer_args(spec: JobSpec) -> list[str]:
    """The container's arguments: the user's, the paths in the pod, and the preset by name."""
    path = f"/{spec.data_path}" if spec.data_path else ""
    # The preset by name: a manifest must mean the same model wherever it runs. --device: a pod on a
    # node without working CUDA would silently train on its CPU.
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

    A changed job has a new id, and an unchanged job the same: a job must not find an id that
    another job has closed.
    """
    digest = spec_hash(job)
    job["metadata"].setdefault("annotations", {})[SPEC_HASH] = digest
    job["spec"]["elasticPolicy"]["rdzvId"] = f"{job['metadata']['name']}-{digest[:8]}"
    return job


def _pytorchjob(spec: JobSpec) -> Object:
    """Workers only, with an elasticPolicy at any size: else the operator sets no rendezvous."""
    namespace = {"namespace": spec.namespace} if spec.namespace else {}
    # Kueue suspends a job with such a label at its creation.
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
                "rdzvBackend": "c10d",  # the operator needs one; the launcher has its own
            },
            # With the operator's default None the other pods would keep running, with their GPUs.
            "runPolicy": {"cleanPodPolicy": "Running"},
            "pytorchReplicaSpecs": {
                "Worker": {
                    "replicas": spec.replicas,
                    # The launcher's codes: 1 to 127 fail the job, 128 and above replace the pod.
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
    """The pods' annotations: for a Prometheus without its operator, and for Kueue.

    All pods have the same port; only rank 0 answers there.
    """
    port = _metrics_port(spec)
    scraping = {"prometheus.io/scrape": "true", "prometheus.io/port": str(port)} if port else {}
    kind, _, label = (spec.topology or "").partition("=")
    wish = {f"kueue.x-k8s.io/podset-{kind}-topology": label or "true"} if kind else {}
    return {**scraping, **wish}


def _metrics_port(spec: JobSpec) -> int:
    """The port of the metrics; 0: none, if the user has turned them off."""
    given: int | None = spec.train.metrics_port
    return METRICS_PORT if given is None else given


def _pod_spec(spec: JobSpec) -> Object:
    """A pod that the `restricted` Pod Security Standard admits."""
    devices = [*([spec.gpu_resource] if spec.gpus > 0 else []), *pod.devices(spec.pod)]
    return {
        **pod.account(spec.pod, own=spec.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service named gptddp would set GPTDDP_* variables
        "securityContext": {
            "runAsNonRoot": True,
            "fsGroup": 1000,  # makes a fresh volume writable for any user id
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
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
            claim_volume("data", spec.claim),
            # With two volumes of one claim the kubelet waits for the second for ever.
            *([claim_volume("runs", spec.runs_claim)] if _runs(spec) == "runs" else []),
            {"name": "scratch", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": spec.shm}},
            *code_volume.volumes(spec.name, spec.code),
        ],
    }


def claim_volume(name: str, claim: str, read_only: bool = False) -> Object:
    """A claim as a volume; `read_only`: on the node too, as ReadOnlyMany claims require."""
    source = {"claimName": claim, **({"readOnly": True} if read_only else {})}
    return {"name": name, "persistentVolumeClaim": source}


def _runs(spec: JobSpec) -> str:
    """The name of the runs' volume: the data's if both have one claim."""
    return "data" if spec.runs_claim == spec.claim else "runs"


def _container(spec: JobSpec) -> Object:
    """The container; the operator requires the name `pytorch`. It runs the image's entrypoint."""
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
        "ports": [  # all with names: the operator copies them into a Service
            {"name": "pytorchjob-port", "containerPort": RENDEZVOUS_PORT},
            *(  # each worker process of the pod has a launcher with its own port
                {"name": f"launcher-{i}", "containerPort": RENDEZVOUS_PORT + i}
                for i in range(1, spec.nproc_per_node or 1)
            ),
            *([{"name": "metrics", "containerPort": port}] if port else []),
        ],
        "resources": {"requests": resources, "limits": dict(resources)},
        "livenessProbe": _liveness(spec),
        **_container_fields(),
        "volumeMounts": [
            {"name": "data", "mountPath": DATA, "readOnly": True},
            {"name": _runs(spec), "mountPath": RUNS},
            {"name": "scratch", "mountPath": SCRATCH},
            {"name": "shm", "mountPath": SHM},
            *code_volume.mounts(spec.code),
        ],
    }


def _container_fields() -> Object:
    """The container's part of the `restricted` standard, and the source of its last message."""
    return {
        # The end of the log, with the reason of a failure, becomes the container's message.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }


def _liveness(spec: JobSpec) -> Object:
    """Restarts the container when its launcher hangs; the launcher itself watches the workers.

    The launcher touches the file every second, also while it waits for peers. Its loop pauses for
    at most a grace period, when it ends its workers. The probe passes if there is no file, as
    before the loop begins, or no `find` in the image.
    """
    minutes = 5 + -(-spec.grace_s // 60)
    return {
        "exec": {
            "command": ["sh", "-c", f'! find "$GPTDDP_ALIVE" -mmin +{minutes} | grep -q .'],
        },
        "periodSeconds": 60,
        "timeoutSeconds": 30,  # for a busy node
        "failureThreshold": 3,
    }


def own_env(spec: JobSpec) -> list[Object]:
    """The launcher's variables, which a user may not set."""
    ours = {
        "GPTDDP_ALIVE": ALIVE,
        "GPTDDP_GRACE_S": str(spec.grace_s),
        "HOME": SCRATCH,
        "TMPDIR": SCRATCH,
    }
    name = {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    key = {"name": KEY, "valueFrom": companions.secret_ref(spec.name)}
    return [name, key, *({"name": k, "value": v} for k, v in ours.items())]
