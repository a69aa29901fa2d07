"""The part of the Kubernetes API that gptddp needs, through the package `kubernetes`.

Objects are plain dicts. Every failure is a ClusterError with the server's message, except "not
found", which is a result: None or False.
"""

import contextlib
import difflib
import functools
import json
import math
import re
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from gptddp.errors import ConfigError
from gptddp.k8s import login
from gptddp.k8s.exit_codes import ClusterError, NotFoundError
from gptddp.k8s.objects import CLUSTER_WIDE, ROUTES, Object

JOB = "PyTorchJob"
FIELD_MANAGER = "gptddp-k8s"
_CONNECT_S, _QUIET_S = 5.0, 30.0  # timeouts: to connect; between two bytes of an answer
INSTALL_OPERATOR = (
    "install the Kubeflow training operator v1.9 with `kubectl apply --server-side -k "
    "github.com/kubeflow/training-operator/manifests/overlays/standalone?ref=v1.9.4`"
)
LogIn = Callable[[], tuple[Any, str]]
_Answer = TypeVar("_Answer")
_Otherwise = TypeVar("_Otherwise")


class _NoObject(ClusterError):
    """The server knows the kind, but has no object of this name."""


def if_allowed(call: Callable[[], _Answer], otherwise: _Otherwise) -> _Answer | _Otherwise:
    """The result of the call, or `otherwise` if the server forbids it (403)."""
    try:
        return call()
    except ClusterError as error:
        if error.status != 403:
            raise
        return otherwise


class Cluster:
    """One namespace of one cluster; safe for use by several threads."""

    local = False  # True: the jobs of this machine in place of a cluster's

    def __init__(self, log_in: LogIn | None, namespace: str, flags: str = "") -> None:
        """log_in: returns a client and its namespace; called again when the login has expired."""
        self._log_in = log_in
        self._one = threading.Lock()  # held during a login, by one thread at a time
        self._client: Any
        self._client, own = log_in() if log_in else (None, "")
        self.namespace = namespace or own
        self.flags = flags  # the options that name the cluster, for suggested commands
        # the same for kubectl, always with the namespace, which may come from a job file
        self.kubectl = flags if flags.startswith(" -n ") else f" -n {self.namespace}{flags}"

    def get(self, kind: str, name: str) -> Object | None:
        """The object of this name; None if there is none."""
        try:
            return self._json("get", self._path(kind, name))
        except _NoObject:
            return None

    def job(self, name: str) -> Object:
        """The PyTorchJob of this name; raises NotFoundError."""
        found = self.get(JOB, name)
        if found is None:
            raise self.not_found(name)
        return found

    def not_found(self, name: str) -> NotFoundError:
        """The error for a name without a job, with similar names."""
        with contextlib.suppress(ClusterError):
            if self.get("Job", name):  # of `prepare`
                look = f"`kubectl logs job/{name}{self.kubectl}` shows its log"
                return NotFoundError(f"{name} is a short Job, not a training job: {look}")
        near = self.near(JOB, name)
        elsewhere = "-n names another; `list -A` shows the jobs of all"
        there = f"there are {', '.join(near)}" if near else elsewhere
        return NotFoundError(f"no PyTorchJob {name} in the namespace {self.namespace}: {there}")

    def near(self, kind: str, meant: str) -> list[str]:
        """Similar names of a kind, else some of its names; empty if they cannot be read."""
        try:
            names = [str(it["metadata"]["name"]) for it in self.find(kind)]
        except ClusterError:
            return []
        return difflib.get_close_matches(meant, names, n=3) or names[:5]

    def find(self, kind: str, selector: str = "", everywhere: bool = False) -> list[Object]:
        """Objects of a kind by label selector, in this namespace or in all."""
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
        """Create an object; the server refuses fields that it does not know. 409 if it exists."""
        return self._json("post", self._path(body["kind"]), _writing(dry_run), body)

    def patch(self, kind: str, name: str, patch: Mapping[str, Any]) -> Object:
        """Merge-patch an object (RFC 7386): None removes a field, a list replaces a list."""
        merge = "application/merge-patch+json"
        return self._json("patch", self._path(kind, name), _writing(False), patch, merge)

    def apply(self, body: Mapping[str, Any], *, dry_run: bool = False) -> Object:
        """Server-side apply: create the object, or set our fields of it to those of `body`.

        A field that somebody else has set to another value becomes ours.
        """
        path = self._path(body["kind"], body["metadata"]["name"])
        query = _writing(dry_run) | {"force": "true"}
        return self._json("patch", path, query, body, "application/apply-patch+yaml")

    def delete(self, kind: str, name: str, uid: str | None = None) -> bool:
        """Delete an object, and in the background the objects it owns; False if it did not exist.

        uid: uid of the object; another object that has taken its name stays (409).
        """
        options: Object = {"propagationPolicy": "Background"}
        options |= {"preconditions": {"uid": uid}} if uid else {}
        try:
            self._json("delete", self._path(kind, name), body=options)
        except _NoObject:
            return False
        return True

    def ask(self, path: str, query: Mapping[str, Any] | None = None, body: Any = None) -> Object:
        """Request any other path of the API: GET, or POST with a body. Raises ClusterError."""
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
        """The lines of a pod's log, each with its RFC 3339 time and a space before it.

        With `keep_ends` whole lines keep their line feed; a last line without it may be cut. Raises
        ClusterError if the connection breaks, or is silent for `quiet_s`; all lines before that are
        whole.
        """
        query = {
            "timestamps": "true",
            "container": container,
            "follow": "true" if follow else "",
            "previous": "true" if previous else "",
            "sinceTime": since_time,
            "sinceSeconds": math.ceil(since_s) if since_s and not since_time else "",
            "tailLines": "" if tail is None else tail,
        }
        query = {key: value for key, value in query.items() if value != ""}
        answer = self._send("get", self._path("Pod", pod_name) + "/log", query, quiet_s=quiet_s)
        try:
            with self._reached():
                for line in answer:
                    text = line.decode("utf-8", "replace")
                    yield text if keep_ends else text.removesuffix("\n")
        finally:
            answer.close()  # a connection with unread data cannot be reused

    @property
    def server(self) -> str:
        """The address of the API server."""
        return str(self._client.configuration.host)

    def _path(self, kind: str, name: str | None = None, everywhere: bool = False) -> str:
        """The path of an object, or of all objects of a kind (None). Raises ConfigError for ""."""
        group, plural = ROUTES[kind]
        wide = everywhere or kind in CLUSTER_WIDE
        scope = "" if wide else f"/namespaces/{_segment('namespace', self.namespace)}"
        return f"/{group}{scope}/{plural}" + ("" if name is None else f"/{_segment(kind, name)}")

    def _items(self, path: str, query: Mapping[str, Any]) -> list[Object]:
        return list(self._json("get", path, query).get("items") or [])

    def _json(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        content_type: str = "application/json",
    ) -> Object:
        answer = self._send(method, path, query, body, content_type)
        with self._reached():
            value = _table(answer.data)
        # every answer is an object of the API, except the answer of /version
        if not value.keys() & {"kind", "gitVersion"}:
            raise self._no_api_server(answer.headers.get("Content-Type") or "something")
        return value

    def _send(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        content_type: str = "application/json",
        quiet_s: float | None = _QUIET_S,
    ) -> Any:
        """The unread answer of a successful request. Raises ClusterError for a failed one."""
        from kubernetes.client import ApiException

        assert self._log_in is not None
        for last in (False, True):
            client = self._client
            try:
                with self._reached():
                    return client.request(
                        method,
                        path,
                        body,
                        query_params=list((query or {}).items()),
                        content_type=content_type,
                        serialize=False,
                        _request_timeout=(_CONNECT_S, quiet_s),
                    )
            except ApiException as error:
                if last or error.status != 401:
                    raise self._refusal(path, error) from None
            # The package never renews a token without an expiry time, or from a file:
            # https://github.com/kubernetes-client/python/issues/741
            with self._one:
                if self._client is client:  # else another thread has logged in
                    self._client, _ = self._log_in()
        raise AssertionError

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Turn every failure of the connection into a ClusterError."""
        from kubernetes.client import ApiException
        from kubernetes.config import ConfigException
        from urllib3.exceptions import HTTPError, ProxyError

        try:
            yield
        except (ApiException, ConfigException, HTTPError, OSError) as error:
            if isinstance(error, ApiException) and error.status:
                raise
            words = " ".join(str(getattr(error, "reason", "") or error).split())[:300]
            fix = "is it running, and is this the right --context (kubectl config get-contexts)?"
            if words.startswith("SSLError"):
                fix = "does the kubeconfig have the certificates and the `server` of this cluster?"
            elif isinstance(error, ProxyError):
                fix = "is this proxy, of HTTPS_PROXY or of `proxy-url` in the kubeconfig, right?"
            where = f"cannot reach the cluster at {self.server}"
            raise ClusterError(f"{where}: {words}; {fix}") from None

    def _refusal(self, path: str, error: Any) -> ClusterError:
        """The server's error as a ClusterError, with a fix if there is one."""
        status = _table(error.body)
        message = str(status.get("message") or "")
        if error.status == 404:
            if (status.get("details") or {}).get("name"):
                return _NoObject(message, 404)
            # An API server answers an unknown path in plain text, like any other server.
            if status or (path != "/version" and self._is_api_server()):
                return ClusterError(_not_installed(path), 404)
        if not message:
            said = f"{error.status} {error.reason}"
            to = (error.headers or {}).get("Location")
            return self._no_api_server(f"{said}, to {to}" if to else said)
        if error.status == 401:
            message = f"the cluster does not accept your login ({message}): log in again"
        if error.status == 403 and " cannot " in message:
            message += "; ask for the right, or use another --context"
        if "failed calling webhook" in message:
            at = re.search(r"https://([^./:]+)\.([^./:]+)\.svc", message)  # Service and namespace
            fix = f"is {at[1]} running? `kubectl get pods -n {at[2]}`" if at else "is it running?"
            message += f"; {fix}"
        return ClusterError(message, error.status)

    def _is_api_server(self) -> bool:
        try:
            return bool(self.ask("/version"))
        except ClusterError as error:
            return error.status == 403

    def _no_api_server(self, said: str) -> ClusterError:
        return ClusterError(
            f"{self.server} answers with {said}, unlike the API server of a cluster: is it the "
            "right `server` in the kubeconfig, or is there a proxy or a login page in front?"
        )


def connect(
    namespace: str | None = None, kubeconfig: Path | None = None, context: str | None = None
) -> Cluster:
    """The cluster of kubectl's configuration (KUBECONFIG, ~/.kube/config), else of this pod.

    The namespace is the given one, else the context's. Raises ClusterError. Sends nothing yet.
    """
    flags = {"-n": namespace, "--context": context, "--kubeconfig": kubeconfig}
    given = "".join(f" {k} {shlex.quote(str(v))}" for k, v in flags.items() if v)
    return Cluster(functools.partial(login.log_in, kubeconfig, context), namespace or "", given)


def _table(text: Any) -> dict[str, Any]:
    """Parse a JSON object; {} for any other text."""
    try:
        value = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _writing(dry_run: bool) -> dict[str, str]:
    """The query of a request that writes: the server refuses unknown fields."""
    query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict"}
    return query | ({"dryRun": "All"} if dry_run else {})


def _segment(kind: str, name: str) -> str:
    """A name as a segment of a path, quoted so that it cannot lead elsewhere."""
    if not name or set(name) <= {"."}:
        raise ConfigError(f"{name!r} cannot name a {kind}")
    return quote(name, safe="")


def _not_installed(path: str) -> str:
    """The message for a server without the API group of a path: /apis/GROUP/VERSION."""
    if ROUTES[JOB][0] in path:
        return f"the cluster has no PyTorchJob; {INSTALL_OPERATOR}"
    return f"the cluster does not know {'/'.join(path.split('/')[2:4])}: is it installed?"
