"""Options that several commands share."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def context_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """kubectl's `--context` and `--kubeconfig`, as they are."""
    for option in (
        click.option(
            "--kubeconfig",
            type=click.Path(path_type=Path, dir_okay=False),
            help="kubectl's configuration file [KUBECONFIG, ~/.kube/config]",
        ),
        click.option("--context", help="context of that file [its current one]"),
    ):
        command = option(command)
    return command


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`-n` and the context's options; the command is called with a `cluster`."""

    @functools.wraps(command)
    def connected(
        *args: Any,
        namespace: str | None,
        context: str | None,
        kubeconfig: Path | None,
        **options: Any,
    ) -> Any:
        from gptddp.k8s.cluster import connect

        return command(*args, cluster=connect(namespace, kubeconfig, context), **options)

    namespace = click.option("-n", "--namespace", help="namespace [the context's]")
    return namespace(context_options(connected))
