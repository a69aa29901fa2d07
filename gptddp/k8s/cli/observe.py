"""The commands that only read: `status`, `logs` and `wait`."""

from typing import Any

import click

from gptddp.errors import visible_lines
from gptddp.k8s.cli import formats, types
from gptddp.k8s.cli.command import note
from gptddp.k8s.cli.options import job_options, name_argument


@click.command()
@name_argument
@click.option("-w", "--watch", is_flag=True, help="show it live until the job ends")
@click.option("--every", type=types.Time(0.2), help="time between looks [2s]")
@click.option(
    "-o", "--output", type=click.Choice(["wide", "name", "json", "yaml"]), help="format [text]"
)
@job_options
@click.pass_context
def status(
    ctx: click.Context,
    name: str,
    watch: bool,
    every: float | None,
    output: str | None,
    cluster: Any,
) -> None:
    """Say how a job does: its state, why it does not run, its step.

    With --watch a live screen, or with -o json an object a line, until the job ends; Ctrl-C leaves
    the job alone. Exit code 102: there is no such job; 0 in any state, with --watch as of `wait`.
    """
    if watch:
        ctx.exit(_watch(cluster, name, every or 2.0, output))
    if every:
        raise click.UsageError("--every has no meaning without --watch: leave it out")
    from gptddp.k8s.objects import is_ours
    from gptddp.k8s.observe import facts, rank_0_log
    from gptddp.k8s.observe import status as job_status

    found = facts.of_job(cluster, name)
    answer = job_status.describe(rank_0_log.with_log(cluster, found))
    if output in ("json", "yaml"):
        return formats.data(answer, output)
    if output == "name":
        return formats.objects([found.job], output)
    click.echo(visible_lines(job_status.to_text(answer, wide=output == "wide")))
    if command := job_status.next_command(answer, cluster.local, is_ours(found.job, name)):
        note(f"next: {command}{cluster.flags}")


def _watch(cluster: Any, name: str, every_s: float, output: str | None) -> int:
    from gptddp.k8s.cli import live_status

    if output == "json":
        return live_status.stream(cluster, name, every_s)
    if output:
        raise click.UsageError(f"-o {output} has no meaning with --watch: use -o json, or no -o")
    return live_status.watch(cluster, name, every_s)


@click.command()
@name_argument
@click.option("--timeout", type=types.SECONDS, help="give up after this time [never]")
@job_options
@click.pass_context
def wait(ctx: click.Context, name: str, timeout: float | None, cluster: Any) -> None:
    """Wait for a job's end, and tell each change of its state.

    Exit code 0: it succeeded, 100: it failed, 102: it is gone or was never there, 103: it is
    suspended (one in a queue of Kueue is waited for), 124: the time is up.
    """
    from gptddp.k8s.observe.wait import until_done

    ctx.exit(until_done(cluster, name, note, timeout))


@click.command()
@name_argument
@click.option("-f", "--follow", is_flag=True, help="go on until the job has ended")
@click.option(
    "--pod",
    type=click.IntRange(0),
    metavar="INDEX",
    help="only of the pod <name>-worker-INDEX, without the prefix [all pods]",
)
@click.option(
    "--tail", type=click.IntRange(0), metavar="N", help="the last lines of each pod [all]"
)
@click.option("--since", type=types.Time(1), help="lines that are not older, as in 10m [all]")
@click.option("--previous", is_flag=True, help="logs of the containers before the last restart")
@click.option("--first-failure", is_flag=True, help="log of the container that failed first")
@job_options
@click.pass_context
def logs(
    ctx: click.Context,
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
    programs; so it is as safe as the image is. With --local a pod's log has all of its restarts.
    """
    from gptddp.k8s.observe import logs as pod_logs

    _refuse_together(ctx)
    if cluster.local:
        from gptddp.k8s.local import act

        return act.show_logs(cluster, name, click.echo, index=pod, tail=tail, follow=follow)
    part = pod_logs.Part(pod, tail, since, previous)
    show = pod_logs.show_job
    if first_failure:
        show = pod_logs.show_first_failure
    elif follow:
        show = pod_logs.follow
    show(cluster, name, click.echo, note, part)


# What has no meaning beside another option of `logs`, and why.
_WITH = {
    "first_failure": (("follow", "previous", "pod"), "it looks for one container that has failed"),
    "follow": (("previous",), "it is of containers that write no more"),
    "local": (("since", "previous", "first_failure"), "a local pod has one log, without times"),
}


def _refuse_together(ctx: click.Context) -> None:
    given = {name for name, value in ctx.params.items() if value not in (None, False)}
    given |= {"pod"} if ctx.params["pod"] is not None else set()  # 0 is an index too
    for name, (others, reason) in _WITH.items():
        for other in others if name in given else ():
            if other in given:
                flag, beside = (f"--{it.replace('_', '-')}" for it in (other, name))
                raise click.UsageError(
                    f"{flag} has no meaning with {beside}: {reason}; leave one out"
                )


COMMANDS = (status, logs, wait)
