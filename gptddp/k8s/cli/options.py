"""Options that several commands share."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gptddp import config, flags
from gptddp.k8s.cli import types
from gptddp.k8s.local.paths import LOCAL_DIR
from gptddp.k8s.render import fields, pod
from gptddp.k8s.render.fields import Kind


def pairs(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> Any:
    """Parse `NAME=VALUE` options into pairs."""
    for value in values:
        if "=" not in value.lstrip("="):
            raise click.BadParameter(f"{value!r} is not of the form {param.metavar}")
    found = [tuple(value.split("=", 1)) for value in values]
    for name, value in found:
        if others := {other for key, other in found if key == name} - {value}:
            raise click.BadParameter(f"{name} is given as {value!r} and as {others.pop()!r}")
    return tuple(found)


def flag_of(field: "dataclasses.Field[Any]") -> dict[str, Any]:
    """Settings of the click option for a field of a job."""
    kind, help = fields.kind(field), field.metadata["help"]
    settings: dict[str, Any] = {"metavar": field.metadata["metavar"]}
    if kind in (Kind.LIST, *fields.TABLES):
        settings |= {"multiple": True, "callback": pairs if kind in fields.TABLES else None}
    elif kind is Kind.TREE:
        settings["type"] = types.FILE
    else:
        settings["type"] = int if kind is Kind.NUMBER else str
        help += f" [default: {field.default}]" if field.default is not None else ""
    return {**settings, "help": help}


def pod_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add flags and `-f job.toml` for what a cluster may require of any pod.

    The command gets a JobSpec as `job`, and uses only its options of pods, image and claims.
    The file's namespace is the default of -n.
    """

    @functools.wraps(command)
    def loaded(*args: Any, file: Path | None, namespace: str | None, **options: Any) -> Any:
        from gptddp.k8s.render import spec

        given = {name: options.pop(name) for name in pod.OF_ANY_POD}
        job = spec.given(file, given, [])
        asked = pod.of_any_pod(job.pod)
        job, namespace = dataclasses.replace(job, pod=asked), namespace or job.namespace
        return command(*args, job=job, namespace=namespace, **options)

    for name, field in reversed(pod.OF_ANY_POD.items()):
        loaded = click.option(fields.flag(name), name, **flag_of(field))(loaded)
    file = click.option(
        "-f",
        "--file",
        type=types.PATH,
        help="job.toml of the job: its settings for pods, image and namespace apply here as well",
    )
    return file(loaded)


def context_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--context` and `--kubeconfig`, with kubectl's meaning."""
    kubeconfig = "kubectl's configuration file [KUBECONFIG, ~/.kube/config]"
    command = click.option("--kubeconfig", type=types.FILE, help=kubeconfig)(command)
    context = "context of kubectl [its current one]"
    return click.option("--context", type=types.WORD, help=context)(command)


def namespace_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `-n`."""
    help = "namespace [the context's]"
    return click.option("-n", "--namespace", type=types.NAMESPACE, help=help)(command)


def train_arguments(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument for the trainer's options after `--`."""

    def complete(ctx: click.Context, param: click.Parameter, start: str) -> list[str]:
        return [it for name in config.FIELDS if (it := flags.flag(name)).startswith(start)]

    metavar = "[-- TRAINER OPTIONS]"
    argument = click.argument("train_args", nargs=-1, metavar=metavar, shell_complete=complete)
    return argument(command)


def name_argument(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument for the job's name."""
    return click.argument("name", type=types.JOB)(command)


def cluster_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `-n`, `--context` and `--kubeconfig`; the command is called with a `cluster`."""

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

    return namespace_option(context_options(connected))


def job_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Like `cluster_options`, plus --local: `cluster` may be the jobs of this machine."""
    connected = cluster_options(command)

    @functools.wraps(connected)
    def chosen(*args: Any, local: bool, local_dir: Path | None, **options: Any) -> Any:
        if local_dir and not local:
            raise click.UsageError("--local-dir has no meaning here: it is for --local")
        if not local:
            return connected(*args, **options)
        for name in ("namespace", "context", "kubeconfig"):
            if options.pop(name):
                raise click.UsageError(f"--{name} has no meaning here: --local uses no cluster")
        from gptddp.k8s.local.seen import LocalJobs

        return command(*args, cluster=LocalJobs(local_dir or LOCAL_DIR), **options)

    for option in (
        click.option(
            "--local-dir",
            type=types.FOLDER,
            help=f"folder of local jobs [{LOCAL_DIR}]",
        ),
        click.option("--local", is_flag=True, help="use the jobs of this machine, not a cluster"),
    ):
        chosen = option(chosen)
    return chosen


def wait_options(
    good: str = "succeeded", logs: str = "the logs of all pods"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add --wait, --follow and --timeout. `good`: the name of success, `logs`: of the logs."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        until = f"wait until it has ended: exit code 0 {good}, 100 failed"
        for option in (
            click.option("--timeout", type=types.SECONDS, help="limit of the wait: exit code 124"),
            click.option("--follow", is_flag=True, help=f"as --wait, with {logs}"),
            click.option("--wait", is_flag=True, help=until),
        ):
            command = option(command)
        return command

    return add


def refuse_timeout(timeout_s: float | None, waits: bool) -> None:
    """Refuse a --timeout without a wait."""
    if timeout_s is not None and not waits:
        raise click.UsageError("--timeout is the limit of a wait: add --wait or --follow")
