"""Commands that take a job's specification: `render`, `doctor` and `submit`."""

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from gptddp import config, flags
from gptddp.errors import ConfigError, visible
from gptddp.k8s.cli import types
from gptddp.k8s.cli.command import TYPED, Command, note
from gptddp.k8s.cli.options import (
    context_options,
    flag_of,
    pairs,
    refuse_timeout,
    train_arguments,
    wait_options,
)
from gptddp.k8s.local.paths import LOCAL_DIR
from gptddp.k8s.render import spec
from gptddp.k8s.render.spec import JobSpec

# Options shown by `--help`, by groups; `--help-all` shows all.
MAIN = {
    "The job": ("--file", "--sweep", "--name", "--namespace", "--image"),
    "Pods": ("--replicas", "--min", "--max", "--cpu", "--memory", "--gpus", "--env"),
    "Volumes": ("--data", "--runs"),
    "A queue of Kueue": ("--queue",),
    "Cluster requirements": ("--service-account",),
    "On a cluster": ("--context", "--dry-run", "--replace", "--wait", "--follow"),
    "On this machine": ("--local",),
    "Help": ("--help-all",),
}


def spec_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add every field of JobSpec as a flag, `-f job.toml`, and the trainer's options after `--`."""
    command = train_arguments(command)
    for name, field in reversed(spec.FIELDS.items()):
        names = [spec.flag(name), name, *(["-n"] if name == "namespace" else [])]
        command = click.option(*names, **flag_of(field))(command)
    command = click.option(
        "--sweep",
        multiple=True,
        metavar="FIELD=A,B...",
        callback=pairs,
        help="a job NAME-FIELD-VALUE for each value of a trainer's option; may be repeated",
    )(command)
    file = click.option(
        "-f",
        "--file",
        type=types.FILE,
        help="job.toml, - for stdin: [job] for these options, [train] for the trainer's; flags win",
    )
    return file(command)


def trainer_flags() -> list[str]:
    return [flags.flag(name) for name in config.FIELDS]


def load(options: dict[str, Any]) -> list[JobSpec]:
    """Build the jobs from a command's options, and print warnings; raises ConfigError."""
    from gptddp.k8s.render import manifest, rules

    file, train_args = options.pop("file"), options.pop("train_args")
    swept: dict[str, str] = {}
    for name, values in options.pop("sweep"):
        if swept.setdefault(name.replace("-", "_"), values) != values:
            raise ConfigError(f"--sweep: {name} is given twice: give all its values at once")
    jobs = spec.load_all(file, options, train_args, swept)
    for job in jobs:
        rules.refuse(rules.check(job, manifest.pytorchjob(job)))
    for warning in dict.fromkeys(it for job in jobs for it in rules.warnings(job)):
        note(f"warning: {warning}")
    if jobs[0].code is not None:
        note(str(jobs[0].code))
    return jobs


@click.command(
    cls=Command, owner="the trainer", takes=trainer_flags, main={**MAIN, "Output": ("--output",)}
)
@spec_options
@click.option(
    "-o", "--output", type=click.Choice(["yaml", "json"]), default="yaml", help="format [yaml]"
)
def render(output: str, **options: Any) -> None:
    """Print the manifest of a job.

    The same options give the same bytes. No cluster is needed.

    \b
    gptddp-k8s render --replicas 4 -- --steps 1000 | kubectl apply -f -
    """
    from gptddp.k8s.render import companions, manifest

    jobs = load(options)
    objects = [it for job in jobs for it in manifest.objects(job)]
    text = manifest.to_yaml(objects) if output == "yaml" else manifest.to_json(objects)
    click.echo(text, nl=False)
    for job in jobs:
        at = f" -n {job.namespace}" if job.namespace else ""
        note(
            f"the pods sign their rendezvous with a key if the Secret {job.name} exists: "
            f"{companions.key_command(job.name, at)}"
        )


@click.command(cls=Command, owner="the trainer", takes=trainer_flags, main=MAIN)
@spec_options
@context_options
@click.option("-o", "--output", type=click.Choice(["json", "yaml"]), help="format [text]")
@click.pass_context
def doctor(
    ctx: click.Context,
    /,
    output: str | None,
    kubeconfig: Path | None,
    context: str | None,
    **options: Any,
) -> None:
    """Check what a cluster lacks for a job, with a fix for each problem.

    It takes the options of `submit`, because each job needs different nodes and volumes.
    Nothing is changed. Exit code 1: a check failed. A warning may need no fix.

    \b
    gptddp-k8s doctor --replicas 4 --gpus 8
    """
    from gptddp.k8s.act import checks
    from gptddp.k8s.cli import formats
    from gptddp.k8s.cluster import connect
    from gptddp.k8s.render import manifest

    job = load(options)[0]
    cluster = connect(job.namespace, kubeconfig, context)
    objects = manifest.objects(dataclasses.replace(job, namespace=cluster.namespace))
    found = []
    for check in checks.examine(cluster, objects):
        found.append(check)
        if not output:
            click.echo(visible(f"{check.status:6}{check.id:11}{check.text}"))
            if check.fix:
                click.echo(visible(f"{'':17}fix: {check.fix}"))
    if output:
        formats.data([dataclasses.asdict(check) for check in found], output)
    note(checks.summary(found))
    ctx.exit(1 if any(check.status == checks.FAIL for check in found) else 0)


@click.command(cls=Command, owner="the trainer", takes=trainer_flags, main=MAIN)
@spec_options
@context_options
@click.option(
    "--dry-run",
    is_flag=True,
    help="create nothing: let the server check the job, and print what would change",
)
@click.option("--replace", is_flag=True, help="replace a job of this name that has ended")
@click.option(
    "-o", "--output", type=click.Choice(["name", "yaml", "json"]), help="format [what was done]"
)
@wait_options()
@click.option("--local", is_flag=True, help="run the job on this machine, a process per pod")
@click.option(
    "--local-dir",
    type=types.FOLDER,
    help=f"folder of local jobs and volumes [{LOCAL_DIR}]",
)
@click.option(
    "--volume",
    multiple=True,
    metavar="CLAIM=FOLDER",
    callback=pairs,
    help="folder of a claim of a local job [LOCAL_DIR/volumes/CLAIM]; may be repeated",
)
@click.option("-v", "--verbose", is_flag=True, help="show the pods' logs of a local job")
@click.pass_context
def submit(
    ctx: click.Context,
    /,
    local: bool,
    local_dir: Path | None,
    volume: Any,
    verbose: bool,
    kubeconfig: Path | None,
    context: str | None,
    dry_run: bool,
    replace: bool,
    output: str | None,
    wait: bool,
    follow: bool,
    timeout: float | None,
    **options: Any,
) -> None:
    """Start a job on a cluster, or on this machine.

    The cluster is the one of kubectl's context. Repeating the command changes nothing. If a job of
    that name has other settings, the command prints the difference and exits. An ended job stays,
    with its logs, unless --replace deletes it: its run continues from the newest checkpoint. With
    --local each pod is a process on this machine, and the command runs until the job ends; repeat
    it to continue a stopped job. Memory limits and read-only mounts are not enforced there. Exit
    code 0: submitted (with --wait or --local: succeeded), 100: failed, 124: timed out, 130: Ctrl-C.

    \b
    gptddp-k8s submit --replicas 4 -- --steps 1000
    gptddp-k8s submit --replicas 4 --local -- --steps 1000
    """
    from gptddp.k8s.render import manifest

    _refuse_options(ctx, local)
    jobs = load(options)
    code = 0
    if local:
        from gptddp.k8s.exit_codes import INTERRUPTED
        from gptddp.k8s.local import run
        from gptddp.track.trackers import check_installed

        check_installed(jobs[0].train.track)  # the pods run in this environment
        folders = {claim: Path(folder) for claim, folder in volume}
        _say_left_out(jobs[0])
        local_dir = local_dir or LOCAL_DIR
        for job in jobs:
            objects = manifest.objects(job)
            one = run.run(objects, local_dir=local_dir, volumes=folders, verbose=verbose)
            code = max(code, one)
            if code == INTERRUPTED:
                break
        ctx.exit(code)
    from gptddp.k8s.cli import on_cluster
    from gptddp.k8s.cluster import connect

    cluster = connect(jobs[0].namespace, kubeconfig, context)
    for job in jobs:
        objects = manifest.objects(dataclasses.replace(job, namespace=cluster.namespace))
        if dry_run:
            on_cluster.dry_run(cluster, objects, replace=replace)
            continue
        one = on_cluster.submit(
            cluster,
            objects,
            line=shlex.join(["gptddp-k8s", "submit", *ctx.meta[TYPED]]),
            replace=replace,
            output=output,
            wait=wait,
            follow=follow,
            timeout_s=timeout,
        )
        code = max(code, one)
    ctx.exit(code)


def _say_left_out(job: JobSpec) -> None:
    """Warn of pod options that have no meaning for a process on this machine."""
    from gptddp.k8s.render import pod

    if left_out := pod.without_meaning_locally(job.pod):
        flags = ", ".join(map(spec.flag, left_out))
        note(f"warning: with --local {flags} {'have' if left_out[1:] else 'has'} no meaning")


_CLUSTER_OPTIONS = (
    *("kubeconfig", "context", "dry_run", "replace"),
    *("output", "wait", "follow", "timeout"),
)
_LOCAL_OPTIONS = ("local_dir", "volume", "verbose")


def _refuse_options(ctx: click.Context, local: bool) -> None:
    """Refuse an option that has no meaning with --local, or without it."""
    for name in _CLUSTER_OPTIONS if local else _LOCAL_OPTIONS:
        if ctx.get_parameter_source(name) is not ParameterSource.DEFAULT:
            fix = (
                "--local runs the job here until it ends: leave the option out; -v shows the logs"
                if local
                else "it is for --local"
            )
            raise click.UsageError(f"{spec.flag(name)} has no meaning here: {fix}")
    given = {name for name, value in ctx.params.items() if value}
    refuse_timeout(ctx.params["timeout"], bool(given & {"wait", "follow"}))
    for name in ("wait", "follow", "output"):
        if {name, "dry_run"} <= given:
            raise click.UsageError(f"--{name} has no meaning here: --dry-run creates no job")
    if {"follow", "output"} <= given:
        raise click.UsageError("-o has no meaning with --follow: it prints the logs of the pods")


COMMANDS = (render, doctor, submit)
