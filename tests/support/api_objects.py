"""Kubernetes objects in the shapes that the API server gives them."""

import copy

JOB_UID = "0a6bd5b2-3f0e-4a53-9b57-0c1f4f3c7d11"


def at(second, minute=0):
    return f"2026-11-21T09:{minute:02}:{second:02}Z"


def job(*conditions, name="demo", replicas=4, suspend=False, **metadata):
    """A PyTorchJob whose conditions of these types are True, in this order."""
    run_policy = {"cleanPodPolicy": "Running", "suspend": suspend}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {
            "name": name,
            "uid": JOB_UID,
            "creationTimestamp": at(0),
            "labels": {
                "app.kubernetes.io/name": "gptddp",
                "app.kubernetes.io/instance": name,
                "app.kubernetes.io/managed-by": "gptddp-k8s",
            },
            **metadata,
        },
        "spec": {
            "elasticPolicy": {"minReplicas": 2, "maxReplicas": replicas},
            "runPolicy": run_policy,
            "pytorchReplicaSpecs": {"Worker": {"replicas": replicas, "restartPolicy": "ExitCode"}},
        },
        "status": {"conditions": [condition(c) if isinstance(c, str) else c for c in conditions]},
    }


def condition(kind, status="True", message=""):
    message = message or f"PyTorchJob demo is {kind.lower()}."
    return {
        "type": kind,
        "status": status,
        "reason": f"PyTorchJob{kind}",
        "message": message,
        "lastUpdateTime": at(1),
        "lastTransitionTime": at(1),
    }


def pod(index, state=None, phase="Running", last=None, restarts=0, ready=None, job="demo", **rest):
    """Worker `index` on a node, its container in a state such as {"running": {}}."""
    state = {"running": {"startedAt": at(2)}} if state is None else state
    status = {
        "phase": phase,
        "conditions": rest.pop("conditions", []),
        "containerStatuses": [
            {
                "name": "pytorch",
                "image": "gptddp:0.2.0",
                "restartCount": restarts,
                "ready": "running" in state if ready is None else ready,
                "state": state,
                "lastState": last or {},
            }
        ],
    }
    name = f"{job}-worker-{index}"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "uid": rest.pop("uid", f"uid-of-{name}"),
            "creationTimestamp": at(1),
            "labels": {
                "app.kubernetes.io/name": "gptddp",
                "training.kubeflow.org/job-name": job,
                "training.kubeflow.org/operator-name": "pytorchjob-controller",
                "training.kubeflow.org/replica-type": "worker",
                "training.kubeflow.org/replica-index": str(index),
            },
            "ownerReferences": [{"kind": "PyTorchJob", "uid": JOB_UID, "controller": True}],
            **rest.pop("metadata", {}),
        },
        "spec": {
            "nodeName": rest.pop("node", "gptddp-worker"),
            "containers": [
                {
                    "name": "pytorch",
                    "image": "gptddp:0.2.0",
                    "resources": {"limits": {"cpu": "1", "memory": "3Gi"}},
                }
            ],
        },
        "status": {**status, **rest},
    }


def unscheduled(index, message):
    """A pod for which the scheduler has found no node."""
    made = pod(index, phase="Pending")
    del made["spec"]["nodeName"], made["status"]["containerStatuses"]
    made["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    ]
    return made


def terminated(code, message="", reason="Error", second=30):
    return {
        "terminated": {
            "exitCode": code,
            "reason": reason,
            "message": message,
            "startedAt": at(2),
            "finishedAt": at(second),
        }
    }


def waiting(reason, message=""):
    return {"waiting": {"reason": reason, "message": message}}


def event(obj, reason, message, second=5, kind="Warning"):
    meta = obj["metadata"]
    about = {"kind": obj["kind"], "name": meta["name"], "uid": meta["uid"]}
    return {
        "kind": "Event",
        "type": kind,
        "reason": reason,
        "message": message,
        "metadata": {"name": f"{meta['name']}.{reason}.{second}"},
        "involvedObject": about,
        "count": 1,
        "firstTimestamp": at(second),
        "lastTimestamp": at(second),
        "eventTime": None,
    }


def replaced(made, uid):
    """A copy of the pod with another uid, as if it were created again."""
    made = copy.deepcopy(made)
    made["metadata"] |= {"uid": uid, "creationTimestamp": at(0)}
    return made
