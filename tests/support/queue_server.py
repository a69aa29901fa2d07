"""A small API server with Kueue's kinds, and the job `demo` in its queue `team`."""

from support import queue_cases
from support.manifests import worker
from support.queue_cases import QUEUE, local_queue, workload
from support.writable_api_server import WriteAPI, put_claims

from gptddp.k8s.render import manifest

WAITS = ("QuotaReserved", "False", "Pending", "insufficient unused quota for cpu")
NO_RIGHT = 'workloads.kueue.x-k8s.io is forbidden: User "u" cannot list resource "workloads"'
WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2/namespaces/default/workloads"


def queue_server(folder):
    """A server with the queue `team`, whose dry run suspends jobs of queues."""
    server = WriteAPI(folder)
    put_claims(server)
    server.put(local_queue())
    server.kueue = True
    server.webhook = lambda body: held(server, body)
    return server


def held(server, body):
    """Suspend a new job of a queue, as Kueue's webhook does; it refuses nothing."""
    of_queue = QUEUE in (body["metadata"].get("labels") or {})
    if body["kind"] == "PyTorchJob" and server.kueue and of_queue:
        body["spec"]["runPolicy"]["suspend"] = True


def put_job(api, made=None, *, suspend=True):
    """The job `demo` of the queue `team`, with a Workload."""
    found = queue_cases.queued_job(suspend=suspend)
    found["metadata"]["labels"] |= manifest.labels("demo")
    worker(found)["template"] = {"spec": {"containers": [], "terminationGracePeriodSeconds": 60}}
    api.put(found, made or workload(WAITS))
    return found


def live(api):
    return api.objects["workloads", "pytorchjob-demo-1a2b3"]
