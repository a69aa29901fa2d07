"""The objects beside a PyTorchJob, all of its name and with its labels.

The Secret with the key of the rendezvous is none of them: a manifest is no place for secrets. The
pods name it, and run without it too; `submit` makes it, and so may anybody else.

They are rendered before it, as its pods need them, and so cannot name it as their owner: `submit`
makes it so once the job has a uid.
"""

from gptddp.k8s.objects import PRIORITY, QUEUE, Object
from gptddp.k8s.render import pod
from gptddp.k8s.render.pod import PodOptions

SECRET_FIELD = "rendezvous-key"  # of the Secret's data
JOB_NAME = "training.kubeflow.org/job-name"  # label that the operator puts on the job's pods
OURS = "app.kubernetes.io/name=gptddp"  # label selector of all jobs of ours, and their pods
KINDS = ("ServiceAccount", "NetworkPolicy", "PodDisruptionBudget")


def objects(job: Object, metrics_port: int, options: PodOptions) -> list[Object]:
    """The companions of a job, in the order in which they are to be created.

    None that is to be left out, and no account beside one that is there.
    """
    out = {pod.COMPANIONS[name] for name in options.without}
    out |= {"ServiceAccount"} if options.service_account else set()
    return [it for it in _all(job, metrics_port) if it["kind"] not in out]


def _all(job: Object, metrics_port: int) -> list[Object]:
    pods = {"matchLabels": {JOB_NAME: job["metadata"]["name"]}}
    # From anywhere: where the cluster's Prometheus runs is not known here, and the metrics are no
    # secret.
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
                "policyTypes": ["Ingress"],  # what goes out is left to the cluster's own policies
                "ingress": [
                    # All ports: the launchers' are known, gloo and NCCL take any free one.
                    {"from": [{"podSelector": pods}]},
                    *scrape,
                ],
            },
        },
        {
            **_head(job, "policy/v1", "PodDisruptionBudget"),
            "spec": {
                # A drain takes one pod at a time: its peers keep the state in memory.
                "maxUnavailable": 1,
                # A pod that cannot become ready must not keep its node from being drained.
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": pods,
            },
        },
    ]


def secret(job: Object) -> Object:
    """The Secret of a job, without its data."""
    return {**_head(job, "v1", "Secret"), "type": "Opaque"}


def secret_ref(name: str) -> Object:
    """Where a pod's variable gets the key; without the Secret it is not set."""
    return {"secretKeyRef": {"name": name, "key": SECRET_FIELD, "optional": True}}


def key_command(name: str, flags: str) -> str:
    """What makes the Secret of a job by hand; `flags`: those of kubectl that name its place."""
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
