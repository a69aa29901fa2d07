"""What all pods of ours have in common: what the `restricted` Pod Security Standard asks for, no
token, and one folder to write to under a read-only root.

Functions and not constants: who has an object may change it.
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
    """The part that each container repeats."""
    return {
        # The end of the log becomes the pod's status message, with the reason of a failure.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
    }


def scratch_env() -> dict[str, str]:
    """Where programs write their temporary files."""
    return {"HOME": SCRATCH, "TMPDIR": SCRATCH}


def scratch_mount() -> Object:
    return {"name": "scratch", "mountPath": SCRATCH}


def scratch_volume() -> Object:
    return {"name": "scratch", "emptyDir": {}}


def claim_volume(name: str, claim: str, read_only: bool = False) -> Object:
    """A claim as a volume; `read_only`: on its node too, as a claim that is ReadOnlyMany wants."""
    source = {"claimName": claim, **({"readOnly": True} if read_only else {})}
    return {"name": name, "persistentVolumeClaim": source}
