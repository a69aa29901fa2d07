"""`submit` without --local: its output, the next commands, the wait."""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import click

from gptddp.errors import ConfigError, GptddpError, visible
from gptddp.k8s import exit_codes
from gptddp.k8s.act import lifecycle
from gptddp.k8s.act import submit as act
from gptddp.k8s.act.failure import says
from gptddp.k8s.cli.command import note
from gptddp.k8s.cluster import JOB, Cluster
from gptddp.k8s.objects import Object, argument, claim_at, resource, worker_pod_spec
from gptddp.k8s.observe import why
from gptddp.k8s.render.manifest import DATA


def submit(
    cluster: Cluster,
    objects: Sequence[Object],
    *,
    line: str,
    replace: bool,
    output: str | None,
    wait: bool,
    follow: bool,
    timeout_s: float | None,
) -> int:
    """Submit, and wait if requested; returns the exit code. stdout: `pytorchjob.../NAME created`"""
    name, at = objects[-1]["metadata"]["name"], cluster.flags
    job, created = act.submit(cluster, objects, note, line=line, replace=replace)
    if output:
        from gptddp.k8s.cli import formats

        formats.objects([job], output)
    else:
        click.echo(f"{resource(JOB, name)} {'created' if created else 'unchanged'}")
    if not created:
        _say_state(cluster, objects, job)
    if lifecycle.finished(job):
        failed = why.state(job) == why.FAILED
        return exit_codes.FAILED if failed else exit_codes.SUCCEEDED
    if wait or follow:
        return _wait(cluster, name, follow, timeout_s)
    note(f"next: gptddp-k8s status {name}{at}")
    note(f"      gptddp-k8s logs {name} -f{at}")
    if created:
        note(
            f"      gptddp-k8s prepare --source CLAIM/PATH --data {_data(job)}{at}"
            "   (if you have no dataset yet)"
        )
    return exit_codes.SUCCEEDED


def dry_run(cluster: Cluster, objects: Sequence[Object], *, replace: bool) -> None:
    """Print what a submit would create or change; raises ConfigError if it would be refused."""
    job = objects[-1]
    with says("nothing was created: this was a dry run", errors=GptddpError):
        live = cluster.get(JOB, job["metadata"]["name"])
        if live is not None and "deletionTimestamp" in live["metadata"]:
            live = None
        changes = act.review(cluster, objects, live, note)
        replaced = live is not None and replace and lifecycle.finished(live)
        for change in changes:
            would = "differs" if change.fields else "is the same"
            if replaced and change.kind == JOB:
                would = "would be replaced"
            elif not change.exists:
                would = "would be created"
            click.echo(f"{resource(change.kind, change.name)} {would}")
            for field in change.fields:
                click.echo(visible(f"  {field}"))
        if live is not None and not replaced and not act.is_same(live, job):
            raise ConfigError(act.another(cluster, live, changes[-1].fields))


def _say_state(cluster: Cluster, objects: Sequence[Object], job: Object) -> None:
    """Print the state of a job that exists already, and how to continue it."""
    name, state, at = job["metadata"]["name"], why.state(job), cluster.flags
    changed = act.differences(cluster, job, objects)
    later = ", was changed later on the cluster (live -> yours)," if changed else ""
    note(f"the job exists: it was submitted with these options{later} and is {state}")
    for line in act.lines(changed):
        note(line)
    if state == why.SUCCEEDED:
        note(
            "another --name starts a new run; --replace and more --steps continue this one from its"
            " newest checkpoint"
        )
    elif state == why.FAILED:
        note(
            f"`gptddp-k8s status {name}{at}` says why; once that is fixed, the same submit with "
            "--replace continues its run from the newest checkpoint"
        )
    elif state == why.QUEUED:
        note(f"`gptddp-k8s status {name}{at}` says what it waits for in its queue")
    elif state == why.SUSPENDED:
        note(f"`gptddp-k8s resume {name}{at}` continues it")


def _data(job: Object) -> str:
    """The dataset in the form of --data: the claim and the path inside it."""
    pod_spec = worker_pod_spec(job)
    return claim_at(pod_spec, DATA) + argument(pod_spec, "--data").removeprefix(DATA)


def _wait(cluster: Cluster, name: str, follow: bool, timeout_s: float | None) -> int:
    """Wait until the job ends, with its logs on stdout if `follow`; Ctrl-C does not stop it."""
    from gptddp.k8s.observe.wait import until_done

    try:
        if not follow:
            return until_done(cluster, name, note, timeout_s)
        with _logs(cluster, name):
            return until_done(cluster, name, note, timeout_s)
    except KeyboardInterrupt:
        note(f"the job continues; `gptddp-k8s delete {name}{cluster.flags}` ends it")
        raise


@contextlib.contextmanager
def _logs(cluster: Cluster, name: str) -> Iterator[None]:
    """Write the logs of all pods to stdout in a thread, to the end of this context."""
    from gptddp.k8s.observe import logs

    over = threading.Event()

    def show() -> None:
        try:
            logs.follow(cluster, name, click.echo, note, tell_changes=False, stopped=over)
        except (GptddpError, BrokenPipeError) as error:  # `submit --follow | head` closes it
            note(f"the logs end here: {error}")

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
        thread.join(10)  # the last lines of a job that has ended
    finally:
        over.set()  # no thread may be writing to stdout when the process ends
        thread.join(1)
