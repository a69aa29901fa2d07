"""A local job as a cluster would show it: for `status`, `top`, `list` and `wait` with --local.

Read from the job's folder: manifest.yaml, status.json, logs/. Nothing is written.
"""

import difflib
import os
import socket
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from gptddp.errors import ClusterError, NotFoundError
from gptddp.files import read_json
from gptddp.k8s.cluster import JOB, Cluster
from gptddp.k8s.local import locks
from gptddp.k8s.local.screen import relative_path
from gptddp.k8s.objects import Object, condition, holds
from gptddp.k8s.observe import why
from gptddp.k8s.observe.pod_log import CONTAINER
from gptddp.k8s.render.companions import JOB_NAME, OURS

DEFAULT_DIR = Path("gptddp-local")
_LAST_WORDS_BYTES = 4096  # as much as a cluster keeps of a container's


class LocalJobs(Cluster):
    """The jobs of one --local-dir, by the questions that are asked of a cluster."""

    def __init__(self, local_dir: Path) -> None:
        at = "" if local_dir == DEFAULT_DIR else f" --local-dir {local_dir}"
        super().__init__(None, relative_path(local_dir.absolute()), f" --local{at}")
        self.jobs = local_dir / "jobs"

    def get(self, kind: str, name: str, part: str = "") -> Object | None:
        """The PyTorchJob or the pod of this name. Raises ClusterError for a file that is none."""
        found = self.find(kind) if kind != JOB else self._jobs([name])
        return next((it for it in found if it["metadata"]["name"] == name), None)

    def find(self, kind: str, selector: str = "", everywhere: bool = False) -> list[Object]:
        """All jobs, or the pods of all, or of the job that `selector` ends with."""
        names = self._names()
        if kind == JOB:
            return self._jobs(names)
        of = selector.removeprefix(f"{JOB_NAME}=")
        return [pod for name in names if of in (name, "", OURS) for pod in self._pods(name)]

    def events(self, name: str) -> list[Object]:
        """None: what happens to a local job is on the screen of its `submit`."""
        return []

    def log(self, pod_name: str, *, tail: int | None = None, **_: Any) -> Iterator[str]:
        """The last lines of a pod's log, without times. Raises ClusterError."""
        folder = self.jobs / pod_name.rpartition("-")[0].rpartition("-")[0]
        try:
            with open(folder / "logs" / f"{pod_name}.log", "rb") as file:
                if tail is not None:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - 500 * tail))
                lines = deque(file.read().decode(errors="replace").splitlines(), maxlen=tail)
        except OSError as error:
            raise ClusterError(f"the log of {pod_name} cannot be read: {error}") from error
        return iter(lines)

    def not_found(self, name: str) -> NotFoundError:
        """The error for a name without a job, with the names that may have been meant."""
        near = difflib.get_close_matches(name, self._names(), n=3) or self._names()[:5]
        there = f"there are {', '.join(near)}" if near else "--local-dir names another folder"
        return NotFoundError(f"no local job {name} in {self.namespace}: {there}")

    def _names(self) -> list[str]:
        try:
            return sorted(path.name for path in self.jobs.iterdir())
        except OSError:
            return []

    def _jobs(self, names: list[str]) -> list[Object]:
        return [job for name in names if (job := self._job(name))]

    def _job(self, name: str) -> Object | None:
        """As the manifest has it; a job that nobody runs and that has not ended is suspended."""
        folder = self.jobs / name
        try:
            made = yaml.safe_load((folder / "manifest.yaml").read_text("utf-8"))
            told = self._status(name)
            job: Object = {**made, "status": {"conditions": told.get("conditions") or []}}
            job["status"]["local"] = True
            job["metadata"] |= {"creationTimestamp": told.get("startTime"), "uid": name}
            job["metadata"]["namespace"] = self.namespace
            policy = job["spec"].setdefault("runPolicy", {})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as bad:
            where = relative_path(folder)
            raise ClusterError(
                f"{where} is no folder of a local job ({bad}): remove it, or name another"
            ) from bad
        policy["suspend"] = not locks.alive(locks.holder(folder)) and not any(
            holds(job, kind) for kind in why.FINAL
        )
        return job

    def _status(self, name: str) -> dict[str, Any]:
        found = read_json(self.jobs / name / "status.json")
        return found if isinstance(found, dict) else {}

    def _pods(self, name: str) -> list[Object]:
        job = self._job(name)
        if job is None:
            return []
        runs = locks.alive(locks.holder(self.jobs / name))
        told = self._status(name)
        started = (condition(job, "Created") or {}).get("lastTransitionTime")
        return [
            self._pod(name, pod, it, started or told.get("startTime"), runs)
            for pod, it in (told.get("pods") or {}).items()
        ]

    def _pod(
        self, job: str, name: str, told: dict[str, Any], started: str | None, runs: bool
    ) -> Object:
        """`runs`: the job does; without it no pod is there, whatever was said last."""
        phase, code = told.get("phase"), told.get("exitCode")
        up = runs and phase == "Running" and locks.alive(told.get("pid"))
        state: Object = {"waiting": {}}
        if up:
            state = {"running": {"startedAt": started}}
        elif code is not None:
            ended = {"exitCode": code, "reason": "Error" if code else "Completed"}
            state = {"terminated": {**ended, "message": self._last_words(name)}}
        status = {
            "name": CONTAINER,
            "restartCount": told.get("restarts") or 0,
            "ready": up,
            "state": state,
            "lastState": {},
        }
        phase = phase if runs or phase in ("Succeeded", "Failed") else "Stopped"
        role, index = name.rsplit("-", 2)[-2:]
        labels = {
            "training.kubeflow.org/replica-type": role,
            "training.kubeflow.org/replica-index": index,
        }
        owner = {"kind": JOB, "uid": job, "controller": True}
        about = {"name": name, "uid": name, "creationTimestamp": started, "labels": labels}
        return {
            "kind": "Pod",
            "metadata": {**about, "ownerReferences": [owner]},
            "spec": {"nodeName": socket.gethostname(), "containers": []},
            "status": {"phase": phase, "containerStatuses": [status]},
        }

    def _last_words(self, pod_name: str) -> str:
        try:
            lines = list(self.log(pod_name, tail=20))
        except ClusterError:
            return ""
        return "\n".join(lines)[-_LAST_WORDS_BYTES:]
