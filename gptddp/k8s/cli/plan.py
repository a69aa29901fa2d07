"""What a submit would do, and what it needs: `diff` and `doctor`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import click

from gptddp.errors import ClusterError, visible
from gptddp.k8s.cli.command import Command, note
from gptddp.k8s.cli.options import context_options
from gptddp.k8s.cli.submit import load, objects_of, spec_options, trainer_flags

SAME, DIFFERS, ERROR = 0, 1, 2  # as of diff and kubectl


@click.command(cls=Command, of="the trainer", takes=trainer_flags)
@spec_options
@context_options
@click.option("-o", "--output", type=click.Choice(["json"]), help="format [text]")
@click.pass_context
def diff(
    ctx: click.Context,
    /,
    output: str | None,
    kubeconfig: Path | None,
    context: str | None,
    **options: Any,
) -> None:
    """Show what differs between a job on the cluster and these options.

    The options are those of `submit`. Each field is a line, `path: live -> wanted`; nothing is
    changed. Exit code 0: the same, 1: it differs or is not there, 2 and more: an error.

    \b
    gptddp-k8s diff --replicas 4 -- --steps 2000
    """
    from gptddp.k8s.act import plan
    from gptddp.k8s.cluster import connect, resource

    job = load(options)
    try:
        cluster = connect(job.namespace, kubeconfig, context)
        found = plan.changes(
            cluster, objects_of(dataclasses.replace(job, namespace=cluster.namespace))
        )
    except ClusterError as error:
        error.exit_code = ERROR  # 1 would say that it differs
        raise
    if output == "json":
        click.echo(json.dumps([_to_dict(change) for change in found], indent=2))
    else:
        for change in found:
            what = (
                "is not there: it would be created" if change.action == plan.CREATE else "differs"
            )
            click.echo(f"{resource(change.kind, change.name)} {what}")
            for field in change.fields:
                click.echo(visible(f"  {field}"))
    for line in plan.advice(cluster, found):
        note(line)
    ctx.exit(DIFFERS if found else SAME)


def _to_dict(change: Any) -> dict[str, Any]:
    fields = [{"path": it.path, "old": it.old, "new": it.new} for it in change.fields]
    return {"kind": change.kind, "name": change.name, "action": change.action, "fields": fields}


@click.command(cls=Command, of="the trainer", takes=trainer_flags)
@spec_options
@context_options
@click.option(
    "--probe", is_flag=True, help="try the claim of the runs with two pods of a short Job"
)
@click.option("-o", "--output", type=click.Choice(["json", "yaml"]), help="format [text]")
@click.pass_context
def doctor(
    ctx: click.Context,
    /,
    probe: bool,
    output: str | None,
    kubeconfig: Path | None,
    context: str | None,
    **options: Any,
) -> None:
    """Look for what a cluster lacks for a job, each with its fix.

    The options are those of `submit`: of another job other nodes, volumes and rights matter.
    Nothing is changed, but with --probe a short Job is run. Exit code 1: something fails; a
    warning may be right as it is.

    \b
    gptddp-k8s doctor --replicas 4 --gpus 8
    """
    from gptddp.k8s.act import doctor as checks
    from gptddp.k8s.act.patient import FAIL, Patient
    from gptddp.k8s.cli import output as formats
    from gptddp.k8s.cluster import connect

    job = load(options)
    cluster = connect(job.namespace, kubeconfig, context)
    patient = Patient(cluster, objects_of(dataclasses.replace(job, namespace=cluster.namespace)))
    found = []
    for check in checks.examine(patient, note if probe else None):
        found.append(check)
        if not output:
            click.echo(visible(f"{check.status:6}{check.id:11}{check.text}"))
            if check.fix:
                click.echo(visible(f"{'':17}fix: {check.fix}"))
    if output:
        formats.data([dataclasses.asdict(check) for check in found], output)
    note(checks.summary(found))
    ctx.exit(1 if any(check.status == FAIL for check in found) else 0)


COMMANDS = (diff, doctor)
