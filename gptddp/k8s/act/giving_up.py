"""Fails a job whose pod is made again and again, and whose container never starts.

The operator makes such a pod anew at once, for ever: it counts only restarts of containers in pods
that run. No controller of ours is on the cluster, so the commands that wait do it, by a deadline
that is over: at the next event of a pod, which is at once here, the operator fails the job.
"""

from gptddp.errors import ClusterError
from gptddp.k8s.act import lifecycle
from gptddp.k8s.cluster import JOB, Cluster
from gptddp.k8s.objects import is_ready, replica_specs, wanted_pods
from gptddp.k8s.observe.facts import Facts
from gptddp.k8s.observe.job_causes import GIVEN_UP
from gptddp.k8s.observe.replaced_causes import Vain, vain
from gptddp.k8s.observe.watcher import Say, transient

MOST_PODS, LEAST_S = 10, 120.0  # a node that shuts down rejects pods for some tens of seconds


class GivingUp:
    """Asked at each look at a job: ends the job where going on is in vain."""

    def __init__(self, cluster: Cluster, say: Say) -> None:
        self._cluster, self._say = cluster, say
        self._over = False  # it is done, or may not be
        self._reason = ""  # the newest that was not vague

    def __call__(self, facts: Facts) -> None:
        found = vain(facts)
        if found and not found.vague:
            self._reason = found.reason
        if self._over or not found or not _is_hopeless(facts, found):
            return
        reason = (
            f"pod {found.pod_name}: {found.told(self._reason or found.reason)}; mend that, then the"
            " same submit with --replace goes on from the newest checkpoint"
        )
        patch = {
            "metadata": {"annotations": {GIVEN_UP: reason}},
            "spec": {"runPolicy": {"activeDeadlineSeconds": 1}},
        }
        try:
            self._cluster.patch(JOB, facts.name, patch)
        except ClusterError as error:
            if transient(error):
                return  # at the next look
            self._say(
                f"{facts.name}: it is in vain, and cannot be ended: {error}; somebody who may can"
                f" `gptddp-k8s suspend {facts.name}{self._cluster.flags}`"
            )
        self._over = True


def _is_hopeless(facts: Facts, found: Vain) -> bool:
    """Is it often and long enough, and can the others not train without this pod?"""
    if not lifecycle.is_ours(facts.job, facts.name):
        return False
    if found.count < MOST_PODS or found.seconds < LEAST_S:
        return False
    role = "master" if "Master" in replica_specs(facts.job) else "worker"
    is_host = found.pod_name == f"{facts.name}-{role}-0"  # of the rendezvous
    policy = facts.job["spec"].get("elasticPolicy") or {}
    enough = int(policy.get("minReplicas") or wanted_pods(facts.job))
    return is_host or sum(map(is_ready, facts.pods)) < enough
