"""A PyTorchJob's conditions as the training operator (v1.9) keeps them, and `status.json`."""

import os
import time
from pathlib import Path

from gptddp import files

FINAL = ("Succeeded", "Failed")


def now() -> str:
    """The time as Kubernetes writes it: UTC, whole seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Conditions:
    """The list in `.status.conditions`; the newest change is the last entry."""

    def __init__(self) -> None:
        self.items: list[dict[str, str]] = []

    def has(self, kind: str) -> bool:
        """Is the condition of this type True?"""
        return any(c["type"] == kind and c["status"] == "True" for c in self.items)

    @property
    def final(self) -> bool:
        return any(map(self.has, FINAL))

    def set(self, kind: str, reason: str, message: str) -> bool:
        """Make one condition True; returns whether that changed anything.

        Once Succeeded or Failed nothing changes. Running and Restarting replace each other, and
        Running turns False at the end.
        """
        old = next((c for c in self.items if c["type"] == kind), None)
        if self.final or (old and old["status"] == "True" and old["reason"] == reason):
            return False
        other = {"Running": "Restarting", "Restarting": "Running"}.get(kind)
        self.items = [c for c in self.items if c["type"] not in (kind, other)]
        if kind in (*FINAL, "Suspended"):
            self._end_running()
        time = now()
        self.items.append(
            {
                "type": kind,
                "status": "True",
                "reason": reason,
                "message": message,
                "lastUpdateTime": time,
                "lastTransitionTime": time,
            }
        )
        return True

    def _end_running(self) -> None:
        for condition in self.items:
            if condition["type"] == "Running":
                condition |= {"status": "False", "lastTransitionTime": now()}


def write_text(path: Path, text: str) -> None:
    """Replace a file at once: a reader sees the old one or the new one.

    Without fsync, which can take seconds beside a checkpoint and would delay a pod's restart.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, "utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def has_succeeded(status_file: Path) -> bool:
    """Does `status.json` say so? Not where there is none, or it cannot be read."""
    try:
        status = files.read_json(status_file)
    except (OSError, ValueError):
        return False
    recorded = status.get("conditions") if isinstance(status, dict) else None
    return any(c.get("type") == "Succeeded" and c.get("status") == "True" for c in recorded or [])
