"""Pods of a rendered job as a cluster has them, as far as discovery goes."""

import copy
from typing import Any

from support.manifests import pod_spec, render_job, worker

ROLE = "training.kubeflow.org/job-role"


def pod(namespace: str, name: str, address: str, role: str = "master") -> dict[str, Any]:
    """`name`: JOB-worker-INDEX; with the labels that the operator gives it, worker 0's `role`."""
    job = name.rpartition("-worker-")[0]
    rendered = render_job({"name": job})
    about = copy.deepcopy(worker(rendered)["template"]["metadata"])
    about["labels"] |= {"training.kubeflow.org/job-name": job} | ({ROLE: role} if role else {})
    return {
        "metadata": {"name": name, "namespace": namespace, **about},
        "spec": pod_spec(rendered),
        "status": {"phase": "Running", "podIP": address},
    }
