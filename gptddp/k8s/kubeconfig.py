"""kubectl's configuration: which API server, and as whom. Read as kubectl reads it.

KUBECONFIG may name several files: of two entries of one name the first counts. Every error names
the file, what is wrong in it, and the fix.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gptddp.errors import ClusterError

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # in a pod
_NO_CLUSTER = (
    "name a kubeconfig with --kubeconfig or KUBECONFIG, or run the job on this machine with --local"
)


@dataclass(frozen=True)
class Entry:
    """A cluster, a user or a context of a kubeconfig."""

    what: str  # as a message names it, with its file
    values: Mapping[str, Any]
    folder: Path  # where relative paths begin

    def text(self, key: str) -> str:
        """A value that is a text; empty where it is not given. Raises ClusterError for others."""
        value = self.values.get(key)
        if not isinstance(value, str | None):
            raise ClusterError(f"{self.what}: {key} is {value!r:.60}: it must be a string")
        return value or ""

    def path(self, key: str) -> str:
        """The path of a file that is named; empty where none is."""
        return str(self.folder / value) if (value := self.text(key)) else ""


@dataclass(frozen=True)
class Access:
    """What it takes to talk to an API server."""

    cluster: Entry
    user: Entry
    namespace: str


def load(path: Path | None, context: str | None) -> Access:
    """The access of a context, by default the current one. Raises ClusterError.

    path: the file, by default those of KUBECONFIG, or ~/.kube/config. Without any of them, what the
    pod has in which this runs.
    """
    files = _files(path)
    read = [(file, content) for file in files if (content := _read(file)) is not None]
    if not read and not path and not context and (_ACCOUNT / "token").exists():
        return _of_this_pod()
    if not read:
        of = "--kubeconfig" if path else "KUBECONFIG" if os.environ.get("KUBECONFIG") else "default"
        named = ", ".join(map(str, files))
        raise ClusterError(f"no cluster to talk to: there is no file {named} ({of}); {_NO_CLUSTER}")
    return _access(read, context)


def contexts(path: Path | None) -> dict[str, Entry]:
    """The contexts by their names. Raises ClusterError."""
    files = _files(path)
    return _named([(it, content) for it in files if (content := _read(it))], "context")


def _files(path: Path | None) -> list[Path]:
    if path:
        return [path]
    named = [Path(text) for text in os.environ.get("KUBECONFIG", "").split(os.pathsep) if text]
    return named or [Path(os.path.expanduser("~/.kube/config"))]


def _read(file: Path) -> Mapping[str, Any] | None:
    """The content of a file, {} of an empty one, None of one that is not there."""
    import yaml

    try:
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        content = yaml.load(file.read_bytes(), loader)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ClusterError(f"cannot read the kubeconfig {file}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        at = f", line {mark.line + 1}" if mark else ""
        text = " ".join(str(getattr(error, "problem", None) or error).split())
        raise ClusterError(f"the kubeconfig {file}{at} is not YAML: {text:.300}") from None
    if not isinstance(content, dict | None):
        raise ClusterError(
            f"the kubeconfig {file} is no table of clusters, users and contexts: name another file"
        )
    return content or {}


def _access(read: list[tuple[Path, Mapping[str, Any]]], context: str | None) -> Access:
    where = ", ".join(str(file) for file, _ in read)
    name = context or next((text for _, it in read if (text := it.get("current-context"))), None)
    contexts = _named(read, "context")
    fix = f"there are {', '.join(contexts)}" if contexts else "it has none"
    if not name:
        raise ClusterError(
            f"the kubeconfig {where} has no current-context: name one with --context, or for good "
            f"with `kubectl config use-context`; {fix}"
        )
    if name not in contexts:
        raise ClusterError(f"there is no context {name} in the kubeconfig {where}: {fix}")
    chosen = contexts[name]
    cluster = _of(chosen, "cluster", _named(read, "cluster"))
    user = _of(chosen, "user", _named(read, "user"))
    namespace = chosen.text("namespace") or "default"
    if not re.fullmatch("[a-z0-9]([-a-z0-9]*[a-z0-9])?", namespace):
        raise ClusterError(
            f"the {chosen.what}: namespace is {namespace!r}: use lower case letters, digits and '-'"
        )
    return Access(cluster, user, namespace)


def _named(read: Iterable[tuple[Path, Mapping[str, Any]]], kind: str) -> dict[str, Entry]:
    """The entries of a kind by their names, of the first file that has the name."""
    found: dict[str, Entry] = {}
    for file, content in read:
        entries = content.get(f"{kind}s") or []
        good = isinstance(entries, list) and all(
            isinstance(it, dict)
            and isinstance(it.get("name"), str)
            and isinstance(it.get(kind), dict | None)
            for it in entries
        )
        if not good:
            raise ClusterError(
                f"the kubeconfig {file}: {kind}s must be a list of tables with name and {kind}"
            )
        for it in entries:
            what = f"{kind} {it['name']} in {file}"
            found.setdefault(it["name"], Entry(what, it.get(kind) or {}, file.absolute().parent))
    return found


def _of(context: Entry, kind: str, entries: Mapping[str, Entry]) -> Entry:
    """The cluster or user that a context names; a context may have no user."""
    name = context.text(kind)
    if not name and kind == "user":
        return Entry(f"the {context.what}", {}, context.folder)
    if name not in entries:
        known = ", ".join(entries) or "none"
        raise ClusterError(
            f"the {context.what} names the {kind} {name or '(none)'}, which is not there; known: "
            f"{known}"
        )
    return entries[name]


def _of_this_pod() -> Access:
    """By the service account that a pod has mounted."""
    host, port = (os.environ.get(f"KUBERNETES_SERVICE_{it}", "") for it in ("HOST", "PORT"))
    host = f"[{host}]" if ":" in host else host
    server = f"https://{host or 'kubernetes.default.svc'}:{port or 443}"
    cluster = {"server": server, "certificate-authority": str(_ACCOUNT / "ca.crt")}
    user = {"tokenFile": str(_ACCOUNT / "token")}
    return Access(
        Entry("the service account of this pod", cluster, _ACCOUNT),
        Entry("the service account of this pod", user, _ACCOUNT),
        (_ACCOUNT / "namespace").read_text("utf-8").strip(),
    )
