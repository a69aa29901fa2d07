"""The companions: objects beside a PyTorchJob, with its name and its labels.

The Secret with the key of the rendezvous is not rendered: a manifest must not contain secrets. The
pods name it, and also run without it; `submit` or anybody else creates it.

Companions are created before the job, as its pods need them, so they cannot name it as their owner:
`submit` sets the owner once the job has a uid.
"""

from gptddp.k8s.objects import PRIORITY, QUEUE, Object
from gptddp.k8s.render import pod
from gptddp.k8s.render.pod import PodOptions

SECRET_FIELD = "rendezvous-key"  # key in the Secret's data
JOB_NAME = "training.kubeflow.org/job-name"  # label that the operator sets on the job's pods
OURS = "app.kubernetes.io/name=gptddp"  # label selector of all our jobs and their pods
KINDS = ("ServiceAccount", "NetworkPolicy", "PodDisruptionBudget")


def objects(job: Object, metrics_port: int, options: PodOptions) -> list[Object]:
    """The companions of a job, in the order in which to create them.

    Leaves out those of --without, and the ServiceAccount if an existing one is used.
    """
    out = {pod.COMPANIONS[name] for name in options.without}
    out |= {"ServiceAccount"} if options.service_account else set()
    return [it for it in _all(job, metrics_port) if it["kind"] not in out]


def _all(job: Object, metrics_port: int) -> list[Object]:
    pods = {"matchLabels": {JOB_NAME: job["metadata"]["name"]}}
    # From anywhere: it is not known where Prometheus runs, and the metrics are no secret.
    scrape = [{"ports": [{"protocol": "TCP", "port": metrics_port}]}] if metrics_port else []
    return [
        {
            **_head(job, "v1", "ServiceAccount"),
            "automountServiceAccountToken": False,  # the trainer never talks to the API
        },
        {
            **_head(job, "networking.k8s.io/v1", "NetworkPolicy"),
            "spec": {
                "podSelector": pods,
                "policyTypes": ["Ingress"],  # egress is left to the cluster's own policies
                "ingress": [
                    # All ports: gloo and NCCL use any free port.
                    {"from": [{"podSelector": pods}]},
                    *scrape,
                ],
            },
        },
        {
            **_head(job, "policy/v1", "PodDisruptionBudget"),
            "spec": {
                # A drain evicts one pod at a time, so that its peers keep the state in memory.
                "maxUnavailable": 1,
                # A pod that cannot become ready must not keep its node from being drained.
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": pods,
            },
        },
    ]


def secret(job: Object) -> Object:
    """A job's Secret, without data."""
    return {**_head(job, "v1", "Secret"), "type": "Opaque"}


def secret_ref(name: str) -> Object:
    """The source of the pod's variable with the key; without the Secret it is not set."""
    return {"secretKeyRef": {"name": name, "key": SECRET_FIELD, "optional": True}}


def key_command(name: str, flags: str) -> str:
    """The command that creates a job's Secret; `flags`: kubectl's, for cluster and namespace."""
    made = f"kubectl create secret generic {name} --from-file={SECRET_FIELD}=/dev/stdin{flags}"
    return f"openssl rand -hex 32 | {made}"


def _head(job: Object, version: str, kind: str) -> Object:
    meta = job["metadata"]
    kept = {key: meta[key] for key in ("name", "namespace") if key in meta}
    own = {key: value for key, value in meta["labels"].items() if key not in (QUEUE, PRIORITY)}
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {**kept, "labels": own},
    }
