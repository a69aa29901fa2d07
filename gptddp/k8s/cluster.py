"""The Kubernetes API as this package needs it, over `gptddp.k8s.transport`.

Objects go in and come out as plain dicts. Every failure is a ClusterError with the server's own
words, except "not found", which is an answer: None or False.
"""

import difflib
import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from gptddp.errors import ClusterError, ConfigError, NotFoundError
from gptddp.k8s import kubeconfig as configuration
from gptddp.k8s.objects import Object
from gptddp.k8s.transport import Answer, Transport

JOB = "PyTorchJob"
_CORE, _ELASTIC = "api/v1", "apis/kubeflow.org/v1"
_KUEUE = "apis/kueue.x-k8s.io/v1beta2"
# In a path of Kueue, in both of its groups: 0.14 serves the older version only, 0.20 the newer.
_NEWER, _OLDER = "kueue.x-k8s.io/v1beta2/", "kueue.x-k8s.io/v1beta1/"
_ROUTES = {  # kind: (API group and version, plural)
    JOB: (_ELASTIC, "pytorchjobs"),
    "Job": ("apis/batch/v1", "jobs"),
    "Pod": (_CORE, "pods"),
    "Service": (_CORE, "services"),
    "Secret": (_CORE, "secrets"),
    "ConfigMap": (_CORE, "configmaps"),
    "Event": (_CORE, "events"),
    "ServiceAccount": (_CORE, "serviceaccounts"),
    "PersistentVolumeClaim": (_CORE, "persistentvolumeclaims"),
    "NetworkPolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
    "PodDisruptionBudget": ("apis/policy/v1", "poddisruptionbudgets"),
    "Workload": (_KUEUE, "workloads"),
    "LocalQueue": (_KUEUE, "localqueues"),
    "ClusterQueue": (_KUEUE, "clusterqueues"),
    "WorkloadPriorityClass": (_KUEUE, "workloadpriorityclasses"),
    # the `pendingworkloads` of a LocalQueue, which Kueue itself serves
    "PendingWorkloads": ("apis/visibility.kueue.x-k8s.io/v1beta2", "localqueues"),
}
_CLUSTER_WIDE = ("ClusterQueue", "WorkloadPriorityClass")
FIELD_MANAGER = "gptddp-k8s"
_TIMEOUTS_S = (5.0, 30.0)  # to connect; between two bytes of an answer
INSTALL_OPERATOR = (
    "install the Kubeflow training operator v1.9, by `kubectl apply --server-side -k "
    "github.com/kubeflow/training-operator/manifests/overlays/standalone?ref=v1.9.3`"
)


class Cluster:
    """One namespace of one cluster."""

    local = False  # are they the jobs of this machine, in the place of a cluster's?

    def __init__(self, transport: Transport | None, namespace: str, flags: str = "") -> None:
        self._transport = transport
        self.namespace = namespace
        self.flags = flags  # the options that name it, for a command to type next
        self._older: set[str] = set()  # how paths begin that this cluster's Kueue has in _OLDER

    def get(self, kind: str, name: str, part: str = "") -> Object | None:
        """The object of this name, or a part of it (a subresource); None if there is none."""
        try:
            return self._json("get", self._path(kind, name) + (part and f"/{part}"))
        except ClusterError as error:
            # Without the operator the server does not know the path of a PyTorchJob either.
            if error.status == 404 and "not found" in str(error):
                return None
            raise

    def job(self, name: str) -> Object:
        """The PyTorchJob of this name; raises NotFoundError."""
        found = self.get(JOB, name)
        if found is None:
            raise self.not_found(name)
        return found

    def not_found(self, name: str) -> NotFoundError:
        """The error for a name without a job, with the names that may have been meant."""
        near = self.near(JOB, name)
        there = f"there are {', '.join(near)}" if near else "-n names another, as `list -A` shows"
        return NotFoundError(f"no PyTorchJob {name} in the namespace {self.namespace}: {there}")

    def near(self, kind: str, meant: str) -> list[str]:
        """The names of a kind that may have been meant, else some of them; they are only a help."""
        try:
            names = [str(it["metadata"]["name"]) for it in self.find(kind)]
        except ClusterError:
            return []
        return difflib.get_close_matches(meant, names, n=3) or names[:5]

    def find(self, kind: str, selector: str = "", everywhere: bool = False) -> list[Object]:
        """Objects of a kind by label selector, of this namespace or of all."""
        query = {"labelSelector": selector} if selector else {}
        return self._items(self._path(kind, everywhere=everywhere), query)

    def events(self, name: str) -> list[Object]:
        """The events about objects of this name, oldest first."""
        query = {"fieldSelector": f"involvedObject.name={name}"}
        return sorted(
            self._items(self._path("Event"), query),
            key=lambda e: e.get("lastTimestamp") or e.get("eventTime") or "",
        )

    def create(self, body: Mapping[str, Any], dry_run: bool = False) -> Object:
        """Create an object, with no field that the server does not know; 409 if it exists."""
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if dry_run else {}
        return self._json("post", self._path(body["kind"]), query, body)

    def patch(
        self, kind: str, name: str, patch: Mapping[str, Any], dry_run: bool = False
    ) -> Object:
        """Merge-patch an object (RFC 7386): None removes a field, a list replaces a list."""
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
        query |= {"dryRun": "All"} if dry_run else {}
        return self._json("patch", self._path(kind, name), query, patch)

    def delete(self, kind: str, name: str) -> bool:
        """Delete an object, and in the background what it owns; False if it was not there."""
        try:
            query = {"propagationPolicy": "Background"}
            self._json("delete", self._path(kind, name), query)
        except ClusterError as error:
            if error.status == 404:
                return False
            raise
        return True

    def ask(self, path: str, query: Mapping[str, Any] | None = None, body: Any = None) -> Object:
        """Any other path of the API: a GET, or with a body a POST. Raises ClusterError."""
        return self._json("get" if body is None else "post", path, query, body)

    def log(
        self,
        pod_name: str,
        *,
        follow: bool = False,
        previous: bool = False,
        since_time: str = "",
        since_s: float | None = None,
        tail: int | None = None,
        quiet_s: float | None = None,
        container: str = "",
        keep_ends: bool = False,
    ) -> Iterator[str]:
        """The lines of a pod's log, each opened by its RFC 3339 time and a space.

        With `keep_ends` whole lines keep their line feed: a last one without may be torn. Raises
        ClusterError where the connection breaks, or stays silent for `quiet_s`: every line that
        was given until then is whole.
        """
        query: dict[str, Any] = {"timestamps": "true"}
        query |= {"container": container} if container else {}
        query |= {"follow": "true"} if follow else {}
        query |= {"previous": "true"} if previous else {}
        query |= {"sinceTime": since_time} if since_time else {}
        query |= {"sinceSeconds": math.ceil(since_s)} if since_s and not since_time else {}
        query |= {"tailLines": tail} if tail is not None else {}
        path = self._path("Pod", pod_name) + "/log"
        answer = self._request("get", path, query, timeouts=(_TIMEOUTS_S[0], quiet_s))
        for line in self._lines(answer):
            yield line if keep_ends else line.removesuffix("\n")

    def _path(self, kind: str, name: str | None = None, everywhere: bool = False) -> str:
        """The address of objects; None: of all of a kind. Raises ConfigError for no name."""
        group, plural = _ROUTES[kind]
        wide = everywhere or kind in _CLUSTER_WIDE
        scope = "" if wide else f"/namespaces/{_segment('namespace', self.namespace)}"
        return f"/{group}{scope}/{plural}" + ("" if name is None else f"/{_segment(kind, name)}")

    def _json(
        self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Any = None
    ) -> Object:
        group, newer, rest = path.partition(_NEWER)
        if newer and group in self._older:
            path, newer = group + _OLDER + rest, ""
        try:
            answer = self._request(method, path, query or {}, body)
        except ClusterError as error:
            if not newer or error.status != 404 or "not found" in str(error):
                raise
            self._older.add(group)
            return self._json(method, path, query, body)
        try:
            value = json.loads(answer.read())
        except OSError as error:
            raise self._unreachable(error) from None
        except (ValueError, RecursionError):
            value = None
        # every answer is an object of the API, but for that of /version
        if not isinstance(value, dict) or not value.keys() & {"kind", "gitVersion"}:
            raise ClusterError(
                f"{self._server} answers with {answer.kind or 'something'}, and not as the API "
                "server of a cluster does: is it the right `server` in the kubeconfig, or is a "
                "proxy or a login page before it?"
            )
        return value

    def _items(self, path: str, query: Mapping[str, Any]) -> list[Object]:
        return list(self._json("get", path, query).get("items") or [])

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: Any = None,
        timeouts: tuple[float, float | None] = _TIMEOUTS_S,
    ) -> Answer:
        """The answer to what the server has done. Raises ClusterError for any other."""
        assert self._transport is not None
        kind = "application/merge-patch+json" if method == "patch" else "application/json"
        try:
            answer = self._transport.request(
                method, path, list(query.items()), body, kind, timeouts=timeouts
            )
            if 200 <= answer.status < 300:
                return answer
            raise ClusterError(_reason(answer, answer.read()), answer.status)
        except OSError as error:
            raise self._unreachable(error) from None

    def _lines(self, answer: Answer) -> Iterator[str]:
        """The lines of a stream with their ends; what is not UTF-8 is replaced."""
        rest = b""
        try:
            for chunk in answer.chunks():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    yield line.decode("utf-8", "replace") + "\n"
            if rest:
                yield rest.decode("utf-8", "replace")
        except OSError as error:
            raise self._unreachable(error) from None

    @property
    def _server(self) -> str:
        return self._transport.server if self._transport else ""

    def _unreachable(self, error: OSError) -> ClusterError:
        cause = " ".join(str(error.strerror or error).split())[:300]
        by = self._transport.by if self._transport else ""
        return ClusterError(
            f"cannot reach the cluster at {self._server}{by}: {cause}; is it running, and is this "
            "the right --context (see kubectl config get-contexts)?"
        )


def _segment(kind: str, name: str) -> str:
    """A name as a part of an address: nothing in it may lead elsewhere."""
    if not name or set(name) <= {"."}:
        raise ConfigError(f"{name!r} cannot name a {kind}")
    return quote(name, safe="")


def group_and_plural(kind: str) -> tuple[str, str]:
    """("kubeflow.org", "pytorchjobs"); the group of Kubernetes' oldest kinds is empty."""
    version, plural = _ROUTES[kind]
    _, *group = version.split("/")[:-1]  # of api/v1 or apis/GROUP/VERSION
    return "".join(group), plural


def resource(kind: str, name: str) -> str:
    """kubectl's word for an object, such as `pytorchjob.kubeflow.org/demo`."""
    group, _ = group_and_plural(kind)
    return ".".join(filter(None, [kind.lower(), group])) + f"/{name}"


def connect(
    namespace: str | None = None, kubeconfig: Path | None = None, context: str | None = None
) -> Cluster:
    """The cluster of kubectl's configuration (KUBECONFIG, ~/.kube/config), else of this pod.

    The namespace is the given one, else the context's. Raises ClusterError; nothing is sent yet.
    """
    access = configuration.load(kubeconfig, context)
    flags = {"-n": namespace, "--context": context, "--kubeconfig": kubeconfig}
    given = "".join(f" {k} {shlex.quote(str(v))}" for k, v in flags.items() if v)
    return Cluster(Transport(access), namespace or access.namespace, given)


def _reason(answer: Answer, body: bytes) -> str:
    """The server's message, with the fix where there is one."""
    status = answer.status
    try:
        message = str(json.loads(body)["message"])
    except (TypeError, ValueError, LookupError, RecursionError):
        message = ""
    # A group of APIs that the server does not have is answered in plain text.
    if status == 404 and (not message or "find the requested resource" in message):
        return f"the cluster has no PyTorchJob: {INSTALL_OPERATOR}"
    if status == 401:
        return f"the cluster does not accept who you are ({message or answer.reason}): log in again"
    if status == 403 and " cannot " in message:
        return f"{message}; ask for the right, or use another --context"
    if "failed calling webhook" in message:
        return f"{message}; {_who_answers(message)}"
    to = f", to {answer.location}" if answer.location else ""
    return message or f"the API server answered {status} {answer.reason}{to}"


def _who_answers(message: str) -> str:
    """Whose webhook it is that does not answer: the Service in its address says so."""
    found = re.search(r"https://([^./:]+)\.([^./:]+)\.svc", message)
    if not found:
        return "`kubectl get mutatingwebhookconfigurations,validatingwebhookconfigurations` has it"
    service, namespace = found.groups()
    of = {"training-operator": "the training operator", "kueue-webhook-service": "Kueue"}
    whose = of.get(service, f"what is behind the Service {service}")
    return f"is {whose} running? `kubectl get pods -n {namespace}`"
