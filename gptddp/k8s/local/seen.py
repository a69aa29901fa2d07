"""Local jobs in the form of a cluster's objects, for the commands that read jobs, with --local.

Reads manifest.yaml, status.json and logs/ in the job's folder. Writes nothing.
"""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from gptddp import files
from gptddp.k8s.cluster import JOB, Cluster
from gptddp.k8s.exit_codes import ClusterError, NotFoundError
from gptddp.k8s.local import locks
from gptddp.k8s.local.paths import options_for, relative_path
from gptddp.k8s.local.screen import end_of, newest
from gptddp.k8s.objects import Object, holds
from gptddp.k8s.observe import why
from gptddp.k8s.observe.pod_log import CONTAINER
from gptddp.k8s.render.companions import JOB_NAME, OURS


class LocalJobs(Cluster):
    """The jobs of one --local-dir, with the read methods of a cluster."""

    local = True

    def __init__(self, local_dir: Path) -> None:
        super().__init__(None, relative_path(local_dir.absolute()), options_for(local_dir))
        self.jobs = local_dir / "jobs"

    def get(self, kind: str, name: str, part: str = "") -> Object | None:
        """The PyTorchJob or the pod of this name. Raises ClusterError for an invalid manifest."""
        found = self.find(kind) if kind != JOB else [self._job(name)]
        return next((it for it in found if it and it["metadata"]["name"] == name), None)

    def find(self, kind: str, selector: str = "", everywhere: bool = False) -> list[Object]:
        """All jobs, or the pods of all jobs or of the job that `selector` ends with."""
        names = sorted(files.names_in(self.jobs))
        jobs = [job for name in names if (job := self._job(name))]
        if kind == JOB:
            return jobs
        wanted = selector.removeprefix(f"{JOB_NAME}=")
        return [pod for name in names if wanted in (name, "", OURS) for pod in self._pods(name)]

    def events(self, name: str) -> list[Object]:
        """Always empty: a local job's events are on the screen of its `submit`."""
        return []

    def log(self, pod_name: str, *, tail: int | None = None, **_: Any) -> Iterator[str]:
        """The last lines of a pod's log, without times, and without lines of earlier pods."""
        path = self.log_of(pod_name)
        pod: Any = (locks.status(path.parents[1]).get("pods") or {}).get(pod_name) or {}
        begin = it if isinstance(it := pod.get("logStart"), int) else 0
        return iter(end_of(path, 500 * (tail or 0), begin)[-(tail or 0) :])

    def log_of(self, pod_name: str) -> Path:
        """The log file of all pods of this name."""
        return self.jobs / pod_name.rpartition("-worker-")[0] / "logs" / f"{pod_name}.log"

    def not_found(self, name: str) -> NotFoundError:
        """The error for a name without a job, with similar names."""
        near = self.near(JOB, name)
        there = f"there are {', '.join(near)}" if near else "--local-dir names another folder"
        return NotFoundError(f"no local job {name} in {self.namespace}: {there}")

    def _job(self, name: str) -> Object | None:
        """The job of the manifest; if it has not ended and has no runner, it is suspended."""
        folder = self.jobs / name
        status = locks.status(folder)
        try:
            job: Object = yaml.safe_load((folder / "manifest.yaml").read_text("utf-8"))
            job["status"] = {"conditions": status.get("conditions") or [], "local": True}
            if run := status.get("run"):
                job["status"]["newest"] = newest(Path(run))
            meta = {"creationTimestamp": status.get("startTime"), "uid": name}
            job["metadata"] |= {**meta, "namespace": self.namespace}
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError) as bad:
            why_not = str(bad) if isinstance(bad, OSError) else "it is no job manifest"
            raise ClusterError(
                f"{relative_path(folder / 'manifest.yaml')} cannot be read: {why_not}; `gptddp-k8s "
                f"delete {name}{self.flags}` removes the job's folder; its volumes stay"
            ) from bad
        ended = any(holds(job, kind) for kind in why.FINAL)
        job["spec"]["runPolicy"]["suspend"] = not ended and not locks.is_running(folder)
        return job

    def _pods(self, job: str) -> list[Object]:
        folder = self.jobs / job
        runs, pods = locks.is_running(folder), locks.status(folder).get("pods") or {}
        return [self._pod(job, name, entry, runs) for name, entry in pods.items()]

    def _pod(self, job: str, name: str, entry: dict[str, Any], runs: bool) -> Object:
        """A pod's object; `runs`: whether the job runs; if not, no pod does, whatever its entry."""
        phase, code, started = map(entry.get, ("phase", "exitCode", "startTime"))
        state: Object = {"waiting": {}}
        if up := runs and phase == "Running" and locks.alive(entry.get("pid")):
            state = {"running": {"startedAt": started}}
        elif code is not None:
            ended = {"exitCode": code, "reason": "Error" if code else "Completed"}
            state = {"terminated": {**ended, "message": "\n".join(self.log(name, tail=20))}}
        status = {"name": CONTAINER, "ready": up, "state": state, "lastState": {}}
        return {
            "kind": "Pod",
            "metadata": {
                "name": name,
                "uid": f"{name} of {started}",
                "creationTimestamp": started,
                "ownerReferences": [{"kind": JOB, "uid": job, "controller": True}],
            },
            "spec": {"nodeName": socket.gethostname(), "containers": []},
            "status": {
                "phase": phase if runs or phase in ("Succeeded", "Failed") else "Stopped",
                "containerStatuses": [status],
            },
        }
