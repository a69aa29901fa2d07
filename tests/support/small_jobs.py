"""Small PyTorchJobs that run Python code in our image."""

from gptddp import __version__

SLEEP = "import time; time.sleep(600)"
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def job(name, code, *args, replicas=1, suspend=False, policy="ExitCode", pod=(), **container):
    """A PyTorchJob that runs Python code in our image, as the restricted Pod Security wants it."""
    main = {
        "name": "pytorch",
        "image": f"gptddp:{__version__}",
        "command": ["python", "-uc", code, *args],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": {"requests": {"cpu": "10m"}, "limits": {"memory": "64Mi"}},
        "securityContext": RESTRICTED,
        **container,
    }
    spec = {"terminationGracePeriodSeconds": 5, "containers": [main], **dict(pod)}
    worker = {"replicas": replicas, "restartPolicy": policy, "template": {"spec": spec}}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "gptddp"}},
        "spec": {
            "elasticPolicy": {"minReplicas": 1, "maxReplicas": replicas},
            "runPolicy": {"cleanPodPolicy": "Running", "suspend": suspend},
            "pytorchReplicaSpecs": {"Worker": worker},
        },
    }
