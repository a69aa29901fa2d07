"""As whom the API server is asked: a token, a password, a certificate, or what a program gives.

Such a program is an exec plugin of a kubeconfig, by version v1 or v1beta1 of
client.authentication.k8s.io. Without its answer nothing is asked: never as nobody.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gptddp.errors import ClusterError
from gptddp.k8s.kubeconfig import Entry

_VERSIONS = tuple(f"client.authentication.k8s.io/{it}" for it in ("v1", "v1beta1"))
_EARLY_S = 10.0  # before the end of a token's time
_REREAD_S = 60.0  # a token in a file is replaced by others


@dataclass(frozen=True)
class Login:
    """What a request brings: a bearer token, or a certificate with its key, both in PEM."""

    token: str = ""
    certificate: bytes = b""
    key: bytes = b""
    until: float = float("inf")  # seconds since the epoch


class Credentials:
    """Of one user; may be asked by several threads."""

    def __init__(self, user: Entry, cluster: Entry) -> None:
        self._user, self._cluster = user, cluster
        self._login: Login | None = None
        self._lock = threading.Lock()

    def login(self) -> Login:
        """What is valid now. Raises ClusterError where there is nothing."""
        with self._lock:
            if self._login is None or time.time() > self._login.until:
                self._login = self._new()
            return self._login

    def renew(self, refused: Login) -> bool:
        """After a login was refused: can there be another one? It is got with the next request."""
        with self._lock:
            if self._login is refused:
                self._login = None
        return bool(self._user.values.get("exec") or self._user.text("tokenFile"))

    def headers(self, login: Login) -> list[tuple[str, str]]:
        """Of every request."""
        found = _impersonation(self._user)
        if login.token:
            found.append(("Authorization", f"Bearer {login.token}"))
        elif name := self._user.text("username"):
            import base64

            pair = f"{name}:{self._user.text('password')}".encode()
            found.append(("Authorization", f"Basic {base64.b64encode(pair).decode()}"))
        return found

    def _new(self) -> Login:
        user = self._user
        certificate, key = pem(user, "client-certificate"), pem(user, "client-key")
        if bool(certificate) != bool(key):
            raise ClusterError(f"{user.what}: client-certificate and client-key go together")
        if path := user.path("tokenFile"):
            token = _file(user, "tokenFile", path).decode("utf-8", "replace").strip()
            return Login(token, certificate, key, time.time() + _REREAD_S)
        if token := user.text("token").strip():
            return Login(token, certificate, key)
        if plugin := user.values.get("exec"):
            return _ask(plugin, user, self._cluster)
        if provider := user.values.get("auth-provider"):
            return Login(_id_token(provider, user))
        return Login("", certificate, key)


def pem(entry: Entry, key: str) -> bytes:
    """The value of `<key>-data`, or the content of the file that `<key>` names; b"" for neither."""
    if text := entry.text(f"{key}-data"):
        import base64

        try:
            return base64.b64decode(text, validate=True)
        except ValueError:
            raise ClusterError(f"{entry.what}: {key}-data is not base64") from None
    path = entry.path(key)
    return _file(entry, key, path) if path else b""


def _file(entry: Entry, key: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ClusterError(f"{entry.what}: {key} {path}: {error.strerror}") from None


def _impersonation(user: Entry) -> list[tuple[str, str]]:
    found = [("Impersonate-User", user.text("as")), ("Impersonate-Uid", user.text("as-uid"))]
    found += [("Impersonate-Group", group) for group in _texts(user, "as-groups")]
    extra = user.values.get("as-user-extra") or {}
    more = Entry(
        f"{user.what}: as-user-extra", extra if isinstance(extra, dict) else {}, user.folder
    )
    for key in more.values:
        found += [(f"Impersonate-Extra-{key}", text) for text in _texts(more, str(key))]
    return [(name, text) for name, text in found if text]


def _id_token(provider: Any, user: Entry) -> str:
    """The token of the old way for OpenID Connect, which kubectl renews and writes back."""
    config = provider.get("config") if isinstance(provider, dict) else None
    token = config.get("id-token") if isinstance(config, dict) else None
    fix = "`kubectl get pods` with this context renews it"
    if not isinstance(token, str) or not token:
        raise ClusterError(f"{user.what}: its auth-provider has no id-token: {fix}")
    import base64

    try:
        claims = token.split(".")[1]
        end = json.loads(base64.urlsafe_b64decode(claims + "=" * (-len(claims) % 4)))["exp"]
    except (ValueError, LookupError, TypeError):
        return token  # the server knows better
    if isinstance(end, int | float) and time.time() > end:
        raise ClusterError(f"{user.what}: the login of its auth-provider has expired: {fix}")
    return token


# -- exec plugins --------------------------------------------------------------------------------


def _ask(plugin: Any, user: Entry, cluster: Entry) -> Login:
    """The answer of the program. Raises ClusterError that names it, and how to get it."""
    import subprocess

    it = Entry(
        f"{user.what}: its exec plugin", plugin if isinstance(plugin, dict) else {}, user.folder
    )
    version = it.text("apiVersion")
    if version not in _VERSIONS:
        raise ClusterError(
            f"{it.what} has the apiVersion {version!r}: use {' or '.join(_VERSIONS)}; an update of "
            "the program writes such a kubeconfig"
        )
    command = [_program(it), *_texts(it, "args")]
    try:
        ended = subprocess.run(
            command, stdout=subprocess.PIPE, env=_environment(it, version, cluster), check=False
        )
    except (OSError, ValueError) as error:
        raise ClusterError(f"{it.what} {command[0]} cannot be run: {error}") from None
    if ended.returncode:
        raise ClusterError(
            f"{it.what} {command[0]} ended with exit code {ended.returncode}: log in again "
            "with the tool that it belongs to"
        )
    return _answer(it, command[0], ended.stdout)


def _program(it: Entry) -> str:
    """The path of the program: beside the kubeconfig, or on PATH."""
    import shutil

    command = it.text("command")
    path = str(it.folder / command) if os.sep in command else command
    found = shutil.which(path) if command else None
    if found is None:
        hint = " ".join(it.text("installHint").split())
        raise ClusterError(
            f"{it.what} {command or '(no command)'} is not installed, or not on PATH"
            + (f": {hint}" if hint else "; install it, or use another --context")
        )
    return found


def _texts(it: Entry, key: str) -> list[str]:
    """A list of texts; empty where it is not given."""
    values = it.values.get(key) or []
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ClusterError(f"{it.what}: {key} must be a list of strings")
    return values


def _environment(it: Entry, version: str, cluster: Entry) -> dict[str, str]:
    interactive = sys.stdin is not None and sys.stdin.isatty()
    mode = it.text("interactiveMode") or "IfAvailable"
    if mode == "Always" and not interactive:
        raise ClusterError(f"{it.what} asks for a login at a terminal, and there is none here")
    spec: dict[str, Any] = {"interactive": interactive and mode != "Never"}
    if it.values.get("provideClusterInfo"):
        data = pem(cluster, "certificate-authority")
        spec["cluster"] = {"server": cluster.text("server")}
        if data:
            import base64

            spec["cluster"]["certificate-authority-data"] = base64.b64encode(data).decode()
    info = {"kind": "ExecCredential", "apiVersion": version, "spec": spec}
    pairs = it.values.get("env") or []
    if not isinstance(pairs, list) or not all(
        isinstance(pair, dict) and isinstance(pair.get("name"), str) for pair in pairs
    ):
        raise ClusterError(f"{it.what}: env must be a list of tables, each with name and value")
    given = {pair["name"]: str(pair.get("value") or "") for pair in pairs}
    return {**os.environ, **given, "KUBERNETES_EXEC_INFO": json.dumps(info)}


def _answer(it: Entry, program: str, said: bytes) -> Login:
    try:
        status: Mapping[str, Any] = json.loads(said)["status"]
        token, certificate, key = (
            str(status.get(name) or "")
            for name in ("token", "clientCertificateData", "clientKeyData")
        )
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ClusterError(
            f"{it.what} {program} did not print an ExecCredential with a status: update it"
        ) from None
    if not token and not (certificate and key):
        raise ClusterError(
            f"{it.what} {program} gave neither a token nor a certificate with its key"
        )
    from gptddp.k8s.objects import seconds

    end = seconds(str(status.get("expirationTimestamp") or ""))
    return Login(token, certificate.encode(), key.encode(), (end or float("inf")) - _EARLY_S)
