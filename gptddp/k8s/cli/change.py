"""Commands that change a job on a cluster: delete, scale, suspend, resume."""

from typing import TYPE_CHECKING, Any

import click

from gptddp.k8s.cli.command import note
from gptddp.k8s.cli.options import cluster_options, job_options, name_argument

if TYPE_CHECKING:
    from gptddp.k8s.cluster import Cluster


@click.command()
@name_argument
@click.option("--no-wait", is_flag=True, help="do not wait until its pods have ended")
@job_options
def delete(cluster: Any, name: str, no_wait: bool) -> None:
    """Delete a job, its pods and the objects created with it.

    Its pods commit a checkpoint before they end. The run directory stays on its volume: submit the
    same job again to continue the run. Exit code 102: there is no such job.

    \b
    gptddp-k8s delete demo
    """
    if cluster.local:
        if no_wait:
            raise click.UsageError("--no-wait has no meaning with --local: leave it out")
        from gptddp.k8s.local import act

        return click.echo(act.delete(cluster, name, note))
    from gptddp.k8s.act import lifecycle
    from gptddp.k8s.act.failure import says
    from gptddp.k8s.cluster import JOB

    with says("nothing was deleted"):
        job = cluster.get(JOB, name)
    for line in lifecycle.delete(cluster, name, job, note):
        click.echo('{} "{}" deleted'.format(*line.split("/")))
    if not no_wait:
        with says("the job is deleted; it is not known whether its pods have ended"):
            lifecycle.wait_gone(cluster, name, note)
    if job and (location := lifecycle.run_location(job)):
        note(f"its run directory stays: {location}; submit the same job again to continue the run")


@click.command()
@name_argument
@click.option("--replicas", type=int, required=True, help="number of pods, from --min to --max")
@cluster_options
def scale(cluster: "Cluster", name: str, replicas: int) -> None:
    """Change the number of pods of a job while it trains.

    The step in flight finishes first. Every step keeps the same rows of data.

    \b
    gptddp-k8s scale demo --replicas 2
    """
    from gptddp.k8s.act import lifecycle

    click.echo(lifecycle.scale(cluster, name, replicas, note))


@click.command()
@name_argument
@job_options
def suspend(cluster: Any, name: str) -> None:
    """Stop a job's pods after they commit a checkpoint, and keep the job.

    \b
    gptddp-k8s suspend demo
    """
    if cluster.local:
        from gptddp.k8s.local import act

        return click.echo(act.suspend(cluster, name, note))
    from gptddp.k8s.act import lifecycle

    click.echo(lifecycle.set_suspended(cluster, name, True, note))


@click.command()
@name_argument
@cluster_options
def resume(cluster: "Cluster", name: str) -> None:
    """Continue a suspended job from its newest checkpoint.

    \b
    gptddp-k8s resume demo
    """
    from gptddp.k8s.act import lifecycle

    click.echo(lifecycle.set_suspended(cluster, name, False, note))


COMMANDS = (delete, scale, suspend, resume)
