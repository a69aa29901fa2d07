"""The commands that only read: `status`, `top`, `logs` and `wait`."""

from typing import Any

import click

from gptddp.errors import visible_lines
from gptddp.k8s.cli import output as formats
from gptddp.k8s.cli import types
from gptddp.k8s.cli.command import note
from gptddp.k8s.cli.options import cluster_options, job_options, name_argument


@click.command()
@name_argument
@click.option(
    "-o", "--output", type=click.Choice(["wide", "name", "json", "yaml"]), help="format [text]"
)
@job_options
def status(name: str, output: str | None, cluster: Any) -> None:
    """Say how a job does: its state, why it does not run, its step.

    Exit code 102: there is no such job; 0 in any state: `wait` has codes for those.
    """
    from gptddp.k8s.observe import facts, progress
    from gptddp.k8s.observe import status as job_status

    found = facts.of_job(cluster, name)
    answer = job_status.of(progress.with_log(cluster, found))
    if output in ("json", "yaml"):
        return formats.data(answer, output)
    if output == "name":
        return formats.objects([found.job], output)
    click.echo(visible_lines(job_status.to_text(answer, wide=output == "wide")))
    if command := job_status.next_command(answer, local=" --local" in cluster.flags):
        note(f"next: {command}{cluster.flags}")


@click.command()
@name_argument
@click.option("--once", is_flag=True, help="print it once and end [without a terminal]")
@click.option("--every", type=click.FloatRange(0.2), default=2.0, help="seconds between looks [2]")
@job_options
@click.pass_context
def top(ctx: click.Context, name: str, once: bool, every: float, cluster: Any) -> None:
    """Watch a job: step, loss, speed, goodput, time left, pods.

    The numbers of `status`, made anew until the job ends; Ctrl-C leaves it alone. Where stdout is
    no terminal they are printed once. Exit code as of `wait`, with --once as of `status`.
    """
    from gptddp.k8s.cli import screen

    ctx.exit(screen.watch(cluster, name, once=once, every_s=every))


@click.command()
@name_argument
@click.option("--timeout", type=types.SECONDS, help="give up after this time [never]")
@job_options
@click.pass_context
def wait(ctx: click.Context, name: str, timeout: float | None, cluster: Any) -> None:
    """Wait for a job's end, and tell each change of its state.

    A job of ours is failed whose pod is made again and again, for two minutes at least, and never
    starts.

    Exit code 0: it succeeded, 100: it failed, 102: it is gone or was never there, 103: it is
    suspended (one in a queue of Kueue is waited for), 124: the time is up.
    """
    from gptddp.k8s.act.giving_up import GivingUp
    from gptddp.k8s.observe.wait import until_done

    ctx.exit(until_done(cluster, name, note, timeout, GivingUp(cluster, note)))


@click.command()
@name_argument
@click.option("-f", "--follow", is_flag=True, help="go on until the job has ended")
@click.option(
    "--pod",
    type=click.IntRange(0),
    metavar="INDEX",
    help="of the pod <name>-worker-INDEX only, without the prefix [all pods]",
)
@click.option(
    "--tail", type=click.IntRange(0), metavar="N", help="the last lines of each pod [all]"
)
@click.option("--since", type=types.DURATION, help="what is not older, such as 90s or 1h30m [all]")
@click.option("--previous", is_flag=True, help="of the containers before the last restart")
@click.option("--first-failure", is_flag=True, help="of the container that failed first")
@cluster_options
def logs(
    name: str,
    follow: bool,
    pod: int | None,
    tail: int | None,
    since: float | None,
    previous: bool,
    first_failure: bool,
    cluster: Any,
) -> None:
    """Print what the pods of a job have written.

    Each line is opened by its pod: `[w0] ...`. Without -f they come in the order of time. With -f
    it waits for pods that are not there yet, goes on with those that replace others, and ends with
    the job. What they have written is printed as it is, with the colours and progress bars of
    programs; so it is as safe as the image is.
    """
    from gptddp.k8s.observe import first_failure as failures
    from gptddp.k8s.observe import logs as pod_logs

    if first_failure:
        for given, option in ((follow, "--follow"), (previous, "--previous")):
            if given:
                raise click.UsageError(
                    f"{option} has no meaning with --first-failure: leave it out"
                )
        if pod is not None:
            raise click.UsageError(
                "--pod names a pod, --first-failure looks for one: leave one out"
            )
        failures.show_log(cluster, name, click.echo, note, tail=tail, since_s=since)
        return
    if follow and previous:
        raise click.UsageError("--previous is of containers that write no more: leave out --follow")
    if follow:
        pod_logs.follow(cluster, name, click.echo, note, index=pod, tail=tail, since_s=since)
        return
    pod_logs.show_job(
        cluster, name, click.echo, note, index=pod, tail=tail, since_s=since, previous=previous
    )


COMMANDS = (status, top, logs, wait)
