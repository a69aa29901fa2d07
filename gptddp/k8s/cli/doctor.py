"""`doctor`: checks what a cluster lacks for a job."""

import dataclasses
from pathlib import Path
from typing import Any

import click

from gptddp.errors import visible
from gptddp.k8s.cli.command import Command, note
from gptddp.k8s.cli.options import context_options
from gptddp.k8s.cli.spec_commands import MAIN, load, spec_options, trainer_flags


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


COMMANDS = (doctor,)
