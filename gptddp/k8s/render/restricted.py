"""Fields of all our pods: the requirements of the `restricted` Pod Security Standard, no token, and
one writable folder under a read-only root.

Functions, not constants: callers may change the returned objects.
"""

from gptddp.k8s.objects import Object

SCRATCH = "/tmp"


def pod_fields() -> Object:
    """The pod-wide part of a pod's spec."""
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service named gptddp would set GPTDDP_* variables
        "securityContext": {
            "runAsNonRoot": True,
            "fsGroup": 1000,  # makes a fresh volume writable for any user id
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def container_fields() -> Object:
    """The part of each container's spec."""
    return {
        # The end of the log, with the reason of a failure, becomes the container's message.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }


def scratch_env() -> dict[str, str]:
    """Variables that name the folder of temporary files."""
    return {"HOME": SCRATCH, "TMPDIR": SCRATCH}


def scratch_mount() -> Object:
    return {"name": "scratch", "mountPath": SCRATCH}


def scratch_volume() -> Object:
    return {"name": "scratch", "emptyDir": {}}


def claim_volume(name: str, claim: str, read_only: bool = False) -> Object:
    """A claim as a volume; `read_only`: on the node too, as ReadOnlyMany claims require."""
    source = {"claimName": claim, **({"readOnly": True} if read_only else {})}
    return {"name": name, "persistentVolumeClaim": source}
