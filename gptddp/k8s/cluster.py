"""The Kubernetes API as this package needs it: the only module that loads `kubernetes`.

Objects go in and come out as plain dicts. Every failure is a ClusterError with the server's own
words, except "not found", which is an answer: None or False.
"""

import difflib
import json
import math
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gptddp.errors import ClusterError, GptddpError, NotFoundError
from gptddp.k8s.objects import Object

JOB = "PyTorchJob"
_CORE, _ELASTIC = "api/v1", "apis/kubeflow.org/v1"
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
}
FIELD_MANAGER = "gptddp-k8s"
_TIMEOUTS_S = (5.0, 30.0)  # to connect; between two bytes of an answer
_TOKEN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class Cluster:
    """One namespace of one cluster."""

    def __init__(self, client: Any, namespace: str, flags: str = "") -> None:
        self._client = client  # kubernetes.dynamic.DynamicClient, used for its transport
        self.namespace = namespace
        self.flags = flags  # the options that name it, for a command to type next

    def get(self, kind: str, name: str) -> Object | None:
        try:
            return self._json("get", self._path(kind, name))
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
        try:
            names = [str(job["metadata"]["name"]) for job in self.find(JOB)]
        except ClusterError:  # they are only a help
            names = []
        near = difflib.get_close_matches(name, names, n=3) or names[:5]
        there = f"there are {', '.join(near)}" if near else "-n names another, as `list -A` shows"
        return NotFoundError(f"no PyTorchJob {name} in the namespace {self.namespace}: {there}")

    def find(self, kind: str, selector: str = "", everywhere: bool = False) -> list[Object]:
        """Objects of a kind by label selector, of this namespace or of all."""
        query = {"labelSelector": selector} if selector else {}
        return list(self._json("get", self._path(kind, everywhere=everywhere), query)["items"])

    def events(self, name: str) -> list[Object]:
        """The events about objects of this name, oldest first."""
        query = {"fieldSelector": f"involvedObject.name={name}"}
        found = self._json("get", self._path("Event"), query)["items"]
        return sorted(found, key=lambda e: e.get("lastTimestamp") or e.get("eventTime") or "")

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
        response = self._request("get", path, query, timeouts=(_TIMEOUTS_S[0], quiet_s))
        for line in _lines(response, self._client.configuration.host):
            yield line if keep_ends else line.removesuffix("\n")

    def _path(self, kind: str, name: str = "", everywhere: bool = False) -> str:
        group, plural = _ROUTES[kind]
        scope = "" if everywhere else f"/namespaces/{self.namespace}"
        return f"/{group}{scope}/{plural}" + (f"/{name}" if name else "")

    def _json(
        self, method: str, path: str, query: Mapping[str, Any] | None = None, body: Any = None
    ) -> Object:
        answer: Object = json.loads(self._request(method, path, query or {}, body).data)
        return answer

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any],
        body: Any = None,
        timeouts: tuple[float, float | None] = _TIMEOUTS_S,
    ) -> Any:
        from kubernetes.client import ApiException
        from urllib3.exceptions import HTTPError

        merge = {"content_type": "application/merge-patch+json"} if method == "patch" else {}
        try:
            return self._client.request(
                method,
                path,
                body=body,
                query_params=list(query.items()),
                header_params={"Accept": "*/*"},
                _request_timeout=timeouts,
                serialize=False,
                **merge,
            )
        except ApiException as error:
            raise ClusterError(_reason(error), error.status or 0) from None
        except (HTTPError, OSError) as error:
            raise _unreachable(self._client.configuration.host, error) from None


def resource(kind: str, name: str) -> str:
    """kubectl's word for an object, such as `pytorchjob.kubeflow.org/demo`."""
    _, *group = _ROUTES[kind][0].split("/")[:-1]  # of api/v1 or apis/GROUP/VERSION
    return ".".join([kind.lower(), *group]) + f"/{name}"


def connect(
    namespace: str | None = None, kubeconfig: Path | None = None, context: str | None = None
) -> Cluster:
    """The cluster of kubectl's configuration (KUBECONFIG, ~/.kube/config), else of this pod.

    The namespace is the given one, else the context's. Raises ClusterError; nothing is sent yet.
    """
    try:
        from kubernetes import client, config, dynamic
    except ModuleNotFoundError as error:
        raise GptddpError(
            f"talking to a cluster needs the package {error.name}: pip install 'gptddp[k8s]'"
        ) from None
    settings = client.Configuration()
    found = "default"
    try:
        file = str(kubeconfig) if kubeconfig else None
        config.load_kube_config(file, context=context, client_configuration=settings)
        names, active = config.list_kube_config_contexts(file)
        chosen = next((c for c in names if c["name"] == context), active)
        found = chosen["context"].get("namespace") or "default"
    except config.ConfigException as error:
        if kubeconfig or context or not _TOKEN_NAMESPACE.exists():
            raise ClusterError(
                f"no cluster to talk to: {error}; name a kubeconfig with --kubeconfig or KUBECONFIG"
                " and its context with --context, or run the job on this machine with --local"
            ) from None
        config.load_incluster_config(settings)
        found = _TOKEN_NAMESPACE.read_text("utf-8").strip()
    settings.retries = False  # the message comes at once, and not three warnings before it
    settings.connection_pool_maxsize = 256  # a log of each pod; beyond it urllib3 warns
    transport = dynamic.DynamicClient(
        client.ApiClient(settings), discoverer=lambda client, cache: None
    )
    flags = {"-n": namespace, "--context": context, "--kubeconfig": kubeconfig}
    given = "".join(f" {k} {shlex.quote(str(v))}" for k, v in flags.items() if v)
    return Cluster(transport, namespace or found, given)


def _lines(response: Any, host: str) -> Iterator[str]:
    """The lines of a stream with their ends; what is not UTF-8 is replaced."""
    from urllib3.exceptions import HTTPError

    rest = b""
    try:
        for chunk in response.stream(2**16, decode_content=False):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                yield line.decode("utf-8", "replace") + "\n"
        if rest:
            yield rest.decode("utf-8", "replace")
    except (HTTPError, OSError) as error:
        raise _unreachable(host, error) from None
    finally:
        response.close()  # one that is left early has more to come: it cannot be used again


def _reason(error: Any) -> str:
    """The server's message, with the fix where there is one."""
    try:
        message = str(json.loads(error.body)["message"])
    except (TypeError, ValueError, LookupError):
        message = ""
    # A group of APIs that the server does not have is answered in plain text.
    if error.status == 404 and (not message or "find the requested resource" in message):
        return (
            "the cluster has no PyTorchJob: install the Kubeflow training operator, see operator/"
        )
    if error.status == 401:
        return f"the cluster does not accept who you are ({message or error.reason}): log in again"
    if error.status == 403 and " cannot " in message:
        return f"{message}; ask for the right, or use another --context"
    return message or f"the API server answered {error.status} {error.reason}"


def _unreachable(host: str, error: Exception) -> ClusterError:
    cause = " ".join(str(getattr(error, "reason", None) or error).split())[:300]
    return ClusterError(
        f"cannot reach the cluster at {host}: {cause}; is it running, and is this the right"
        " --context (see kubectl config get-contexts)?"
    )
