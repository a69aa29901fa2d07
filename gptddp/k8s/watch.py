"""The commands that only look: `list`, `status`, `logs` and `wait`."""

from typing import Any

import click

from gptddp.k8s.options import cluster_options


@click.command()
@click.argument("name")
@click.option("--timeout", type=float, metavar="SECONDS", help="give up after this time [never]")
@cluster_options
@click.pass_context
def wait(ctx: click.Context, name: str, timeout: float | None, cluster: Any) -> None:
    """Wait for a job's end, and tell each change of its state.

    Exit code 0: it succeeded, 100: it failed, 102: it is gone or was never there, 103: it is
    suspended, 124: the time is up.
    """
    from gptddp.k8s.wait import until_done

    try:
        ctx.exit(until_done(cluster, name, timeout))
    except KeyboardInterrupt:
        ctx.exit(130)


@click.command()
@click.argument("name")
@click.option("-f", "--follow", is_flag=True, help="go on until the job has ended")
@click.option(
    "-r", "--rank", type=click.IntRange(0), metavar="INDEX",
    help="of this pod only, without the prefix [all pods]",
)  # fmt: skip
@click.option(
    "--tail", type=click.IntRange(0), metavar="N", help="the last lines of each pod [all]"
)
@click.option("--previous", is_flag=True, help="of the containers before the last restart")
@cluster_options
@click.pass_context
def logs(
    ctx: click.Context, name: str, follow: bool, rank: int | None, tail: int | None,
    previous: bool, cluster: Any,
) -> None:  # fmt: skip
    """Print what the pods of a job have written, each line opened by its pod: `[w0] ...`.

    Without -f in the order of time. With -f it waits for pods that are not there yet, goes on
    with those that replace others, and ends with the job.
    """
    from gptddp.k8s import logs as pod_logs
    from gptddp.k8s.look import note

    if follow and previous:
        raise click.UsageError("--previous is of containers that write no more: leave out --follow")
    try:
        if follow:
            pod_logs.follow(cluster, name, click.echo, rank=rank, tail=tail, say=note)
        else:
            pod_logs.show_job(cluster, name, click.echo, rank=rank, tail=tail, previous=previous)
    except KeyboardInterrupt:
        ctx.exit(130)
