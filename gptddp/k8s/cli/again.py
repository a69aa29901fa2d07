"""`rerun`: a job again, from what is on the cluster."""

from typing import TYPE_CHECKING

import click

from gptddp import config, flags
from gptddp.k8s.cli import types
from gptddp.k8s.cli.command import Command, note
from gptddp.k8s.cli.options import (
    cluster_options,
    name_argument,
    refuse_waits,
    train_arguments,
    wait_options,
)

if TYPE_CHECKING:
    from gptddp.k8s.cluster import Cluster


@click.command(cls=Command, of="the trainer", takes=lambda: list(map(flags.flag, config.FIELDS)))
@name_argument
@train_arguments
@click.option("--name", "new_name", type=types.JOB, help="begin a new run, in a job of this name")
@click.option("--image", type=types.WORD, help="another image [the job's]")
@click.option(
    "--dry-run",
    type=click.Choice(["none", "client"]),
    default="none",
    help="change nothing: say what would be created, or with -o print it [none]",
)
@click.option(
    "-o", "--output", type=click.Choice(["name", "yaml", "json"]), help="format [what was done]"
)
@wait_options()
@cluster_options
@click.pass_context
def rerun(
    ctx: click.Context,
    /,
    name: str,
    train_args: tuple[str, ...],
    new_name: str | None,
    image: str | None,
    dry_run: str,
    output: str | None,
    wait: bool,
    follow: bool,
    timeout: float | None,
    cluster: "Cluster",
) -> None:
    """Run a job again with the settings that it has on the cluster.

    A job that has failed is replaced, and its run goes on from the newest checkpoint. With --name
    the job stays, and another one of the same settings begins a run of its own. What stands after
    -- changes settings of the trainer.

    \b
    gptddp-k8s rerun demo
    gptddp-k8s rerun demo --name warmer -- --lr 1e-3
    """
    from gptddp.k8s.act import rerun as act
    from gptddp.k8s.cli import on_cluster

    refuse_waits(timeout, wait, follow, dry_run, output)
    replaced = new_name in (None, name)
    objects = act.objects(cluster, name, new_name or name, train_args, image)
    if replaced:
        act.check_ended(cluster, name, train_args)
    if dry_run == "client":
        return on_cluster.say_created([(it, "created") for it in objects], dry_run, output)
    kept = act.make_room(cluster, objects, note) if replaced else None
    note(_what(name, new_name, replaced))
    code = on_cluster.submit(
        cluster, objects, output=output, wait=wait, follow=follow, timeout_s=timeout, file=kept
    )
    ctx.exit(code)


def _what(name: str, new_name: str | None, replaced: bool) -> str:
    if replaced:
        return f"the run {name} goes on from its newest checkpoint"
    return f"the run {new_name} begins anew, if the claim of the runs has none of that name"


COMMANDS = (rerun,)
