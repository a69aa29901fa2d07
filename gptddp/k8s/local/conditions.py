"""A PyTorchJob's conditions as the training operator (v1.9) keeps them, and `status.json`."""

import json
import os
import time
from pathlib import Path
from typing import Any

FINAL = ("Succeeded", "Failed")


def now() -> str:
    """The time as Kubernetes writes it: UTC, whole seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


class Conditions:
    """The list in `.status.conditions`; the newest change is the last entry."""

    def __init__(self) -> None:
        self.items: list[dict[str, str]] = []

    def has(self, kind: str) -> bool:
        """Is the condition of this type True."""
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
            {"type": kind, "status": "True", "reason": reason, "message": message,
             "lastUpdateTime": time, "lastTransitionTime": time}
        )  # fmt: skip
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


def read_json(path: Path) -> dict[str, Any]:
    """A file's object; empty if there is none or it cannot be read."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
