"""Commands that only read: `list`, `status`, `logs` and `wait`."""

from typing import TYPE_CHECKING, Any

import click

from gptddp.errors import visible, visible_lines
from gptddp.k8s.cli import formats, types
from gptddp.k8s.cli.command import note
from gptddp.k8s.cli.options import job_options, name_argument
from gptddp.units import duration

if TYPE_CHECKING:
    from gptddp.k8s.observe.job_rows import Row


@click.command("list")
@click.option("-A", "--all-namespaces", is_flag=True, help="jobs of all namespaces")
@click.option(
    "-o", "--output", type=click.Choice(["wide", "name", "json", "yaml"]), help="format [a table]"
)
@job_options
def list_(all_namespaces: bool, output: str | None, cluster: Any) -> None:
    """List the jobs of gptddp with their state, pods and age."""
    from gptddp.k8s.observe import job_rows
    from gptddp.k8s.observe.status import table

    rows = job_rows.rows(cluster, all_namespaces)
    if output in ("json", "yaml"):
        formats.data(rows, output)
    elif output == "name":
        for row in rows:
            click.echo(visible(f"pytorchjob.kubeflow.org/{row['name']}"))
    elif rows:
        wide = ["NODES", "QUEUE", "IMAGE"] if output == "wide" else []
        header = [*(["NAMESPACE"] * all_namespaces), "NAME", "STATE", "PODS", "AGE", *wide]
        cells = [_cells(row, all_namespaces, output == "wide") for row in rows]
        click.echo("\n".join(table(header, cells)))
    else:
        prefix = "" if cluster.local else "namespace "
        where = "any namespace" if all_namespaces else f"{prefix}{cluster.namespace}"
        note(f"no jobs of gptddp in {where}")


def _cells(row: "Row", namespace: bool, wide: bool) -> list[str]:
    cells = [row["namespace"]] if namespace else []
    cells += [row["name"], row["state"], f"{row['ready']}/{row['desired']}"]
    cells.append(duration(row["age_s"]))
    if wide:
        nodes = row["nodes"]
        shown = ",".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if nodes[3:] else "")
        cells += [shown or "-", row["queue"] or "-", row["image"] or "-"]
    return [visible(cell) for cell in cells]


@click.command()
@name_argument
@click.option("-w", "--watch", is_flag=True, help="show it live until the job ends")
@click.option("--every", type=types.Time(0.2), help="time between updates [2s]")
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
    """Show a job's state, why it does not run, and its step.

    --watch shows a live screen until the job ends, or with -o json one object per line; Ctrl-C
    does not stop the job. Exit code 102: there is no such job. Otherwise it is 0, or with --watch
    the exit code of `wait`.
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
    """Wait until a job ends, and print each change of its state.

    Exit code 0: it succeeded, 100: it failed, 102: it does not exist any more or never did,
    103: it is suspended (a job in a queue of Kueue is waited for), 124: timed out.
    """
    from gptddp.k8s.observe.wait import until_done

    ctx.exit(until_done(cluster, name, note, timeout))


@click.command()
@name_argument
@click.option("-f", "--follow", is_flag=True, help="continue until the job has ended")
@click.option(
    "--pod",
    type=click.IntRange(0),
    metavar="INDEX",
    help="only pod <name>-worker-INDEX, without the prefix [all pods]",
)
@click.option(
    "--tail", type=click.IntRange(0), metavar="N", help="the last lines of each pod [all]"
)
@click.option("--since", type=types.Time(1), help="only lines newer than this, as in 10m [all]")
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
    """Print the logs of a job's pods.

    Each line begins with its pod: `[w0] ...`. Without -f, lines are sorted by time. With -f the
    command waits for pods that do not exist yet, follows pods that replace others, and ends when
    the job ends. Lines are printed unchanged, with colours and control characters: trust them as
    far as you trust the image. With --local a pod's log includes all its restarts.
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


# Options without meaning beside another option of `logs`, and the reason.
_WITH = {
    "first_failure": (("follow", "previous", "pod"), "it selects one container that has failed"),
    "follow": (("previous",), "previous containers write no new lines"),
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


COMMANDS = (list_, status, logs, wait)
