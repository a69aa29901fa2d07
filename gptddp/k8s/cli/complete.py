"""What the shell completes with what there is: jobs, namespaces, queues, claims, contexts.

Nobody has asked for anything yet, and the prompt waits: an answer that is not there in a moment is
none, and so is every error.
"""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptddp import config, flags

if TYPE_CHECKING:
    from gptddp.k8s.cluster import Cluster

LIMIT_S = 2.0
Ask = Callable[["Cluster"], Iterable[str]]


def jobs(ctx: click.Context, param: click.Parameter | None, start: str) -> list[str]:
    """The jobs of gptddp in the namespace that is given, or with --local of this machine."""
    from gptddp.k8s.render.companions import OURS

    return _names(ctx, start, lambda cluster: _of(cluster.find("PyTorchJob", OURS)))


def namespaces(ctx: click.Context, param: click.Parameter | None, start: str) -> list[str]:
    """Those of the cluster, or where they may not be seen, of kubectl's configuration."""

    def ask(cluster: "Cluster") -> Iterable[str]:
        from gptddp.errors import ClusterError

        try:
            return _of(cluster.ask("/api/v1/namespaces")["items"])
        except ClusterError:
            return _contexts(ctx).values()

    return _names(ctx, start, ask)


def queues(ctx: click.Context, param: click.Parameter | None, start: str) -> list[str]:
    """The namespace's queues of Kueue."""
    return _names(ctx, start, lambda cluster: _of(cluster.find("LocalQueue")))


def claims(ctx: click.Context, param: click.Parameter | None, start: str) -> list[str]:
    """The namespace's PersistentVolumeClaims."""
    return _names(ctx, start, lambda cluster: _of(cluster.find("PersistentVolumeClaim")))


def contexts(ctx: click.Context, param: click.Parameter | None, start: str) -> list[str]:
    """Those of kubectl's configuration."""
    return _within(lambda: [name for name in _contexts(ctx) if name.startswith(start)])


def trainer_flags(ctx: click.Context, param: click.Parameter | None, start: str) -> list[str]:
    """The options of the trainer, which stand after `--`."""
    return [flag for name in config.FIELDS if (flag := flags.flag(name)).startswith(start)]


def _of(objects: Iterable[dict[str, Any]]) -> list[str]:
    return [str(it["metadata"]["name"]) for it in objects]


def _names(ctx: click.Context, start: str, ask: Ask) -> list[str]:
    return _within(lambda: sorted(it for it in ask(_cluster(ctx)) if it.startswith(start)))


def _cluster(ctx: click.Context) -> "Cluster":
    """The one that the command line names so far."""
    given = ctx.params
    if given.get("local"):
        from gptddp.k8s.local.seen import DEFAULT_DIR, LocalJobs

        return LocalJobs(Path(given.get("local_dir") or DEFAULT_DIR))
    from gptddp.k8s.cluster import connect

    return connect(given.get("namespace"), given.get("kubeconfig"), given.get("context"))


def _contexts(ctx: click.Context) -> dict[str, str]:
    from gptddp.k8s import login

    return login.contexts(ctx.params.get("kubeconfig"))


def _within(ask: Callable[[], list[str]]) -> list[str]:
    """What is answered in time; a thread that is not done is left behind."""
    answer: list[str] = []

    def run() -> None:
        try:
            answer.extend(ask())
        except Exception:  # of whatever kind: there is nobody to tell
            answer.clear()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return list(answer)
