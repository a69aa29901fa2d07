"""Commands that run a short Job beside the training: prepare and sample."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptddp import __version__
from gptddp.click_types import Count
from gptddp.k8s.cli import types
from gptddp.k8s.cli.command import Command, note
from gptddp.k8s.cli.options import (
    context_options,
    job_options,
    name_argument,
    namespace_option,
    pod_options,
    refuse_timeout,
    wait_options,
)
from gptddp.k8s.exit_codes import JobFailed

if TYPE_CHECKING:
    from gptddp.k8s.cluster import Cluster
    from gptddp.k8s.objects import Object
    from gptddp.k8s.render.spec import JobSpec

IMAGE = f"gptddp:{__version__}"
_MAIN = {
    "The Job": ("--source", "--data", "--name", "--image", "--cpu", "--memory"),
    "On a cluster": ("--namespace", "--context", "--dry-run", "--wait", "--follow", "--timeout"),
    "Cluster requirements": ("--file", "--service-account"),
    "Help": ("--help-all",),
}


def _prepare_flags() -> list[str]:
    from gptddp.prepare.commands import prepare as command

    return [name for param in command.params for name in param.opts]


@click.command(cls=Command, owner="`gptddp prepare`", takes=_prepare_flags, main=_MAIN)
@click.option(
    "--source",
    required=True,
    metavar="CLAIM[/PATH]",
    help="volume with the texts",
)
@click.option(
    "--data",
    metavar="CLAIM[/PATH]",
    help="where to make the dataset [data]",
)
@click.option("--name", type=types.JOB, default="prepare", help="name of the Job [prepare]")
@click.option("--image", help=f"image with gptddp [{IMAGE}]")
@click.option("--cpu", default="1", help="CPUs of the pod, request and limit [1]")
@click.option("--memory", default="4Gi", help="memory of the pod, request and limit [4Gi]")
@namespace_option
@context_options
@click.option("--dry-run", is_flag=True, help="print the Job without asking a cluster")
@wait_options(good="done", logs="its log")
@pod_options
@click.argument("options", nargs=-1, metavar="[-- PREPARE OPTIONS]")
def prepare(
    source: str,
    data: str | None,
    name: str,
    image: str | None,
    cpu: str,
    memory: str,
    namespace: str | None,
    context: str | None,
    kubeconfig: Path | None,
    dry_run: bool,
    wait: bool,
    follow: bool,
    timeout: float | None,
    job: "JobSpec",
    options: tuple[str, ...],
) -> None:
    """Make a dataset on a volume of the cluster from texts on a volume.

    A batch Job runs `gptddp prepare` with the options after `--`. Repeating the command changes
    nothing while the Job runs or when it is done, and runs a failed Job again.

    \b
    gptddp-k8s prepare --source texts/books --follow -- --vocab-size 4096
    """
    refuse_timeout(timeout, wait or follow)
    if dry_run and (wait or follow):
        raise click.UsageError("--dry-run uses no cluster: leave out --wait and --follow")
    from gptddp.k8s.render import short_job_manifest
    from gptddp.k8s.render.manifest import to_yaml

    _check_options(options)
    given: dict[str, Any] = {"name": name, "cpu": cpu, "memory": memory}
    given |= {"data": data, "image": image}
    stated = dataclasses.replace(job, **{k: v for k, v in given.items() if v is not None})
    batch_job = short_job_manifest.prepare_job(stated, source, options)
    if dry_run:
        batch_job["metadata"] |= {"namespace": namespace} if namespace else {}
        return click.echo(to_yaml([batch_job]), nl=False)
    from gptddp.k8s.cluster import connect

    cluster = connect(namespace, kubeconfig, context)
    _run_prepare(cluster, batch_job, wait, follow, timeout)
    if wait or follow:
        note(f"next: gptddp-k8s submit --data {stated.data}{cluster.flags}")
    else:
        note("next: the same command with --follow shows its log and how it ends")


def _check_options(options: tuple[str, ...]) -> None:
    """Refuse options here that `gptddp prepare` would refuse in the pod."""
    from gptddp.prepare.commands import prepare as command

    if any(option.partition("=")[0] == "--out" for option in options):
        raise click.UsageError("--out after --: set the dataset's location with --data")
    try:
        made = command.make_context("prepare", [".", "--out", ".", *options])
    except click.UsageError as error:
        raise click.UsageError(f"after --: {error.format_message()}") from None
    if more := made.params["sources"][1:]:
        raise click.UsageError(f"unexpected argument {more[0]!r}: name texts with --source")


def _run_prepare(
    cluster: "Cluster", job: "Object", wait: bool, follow: bool, timeout_s: float | None
) -> None:
    """Create the Job; wait for it, with its log on stdout, if requested. Raises JobFailed."""
    from gptddp.k8s.act import short_job
    from gptddp.k8s.objects import resource

    name = job["metadata"]["name"]
    created = short_job.submit(cluster, job, note)
    click.echo(f"{resource('Job', name)} {'created' if created else 'unchanged'}")
    write = click.echo if follow else None
    if wait or follow:
        ended = short_job.watch(cluster, name, note, write=write, timeout_s=timeout_s)
        if ended == short_job.FAILED:
            reason = short_job.reason(cluster, name).replace("--out", "--data")
            raise JobFailed(f"the Job {name} failed: {reason}")


@click.command()
@name_argument
@click.option("--prompt", default="", metavar="TEXT", help="text to continue")
@click.option("--tokens", type=Count(1), default=200, help="number of tokens [200]")
@click.option(
    "--temperature", type=click.FloatRange(0), default=0.8, help="0: most likely token [0.8]"
)
@click.option("--top-k", type=Count(0), default=50, help="most likely tokens; 0: all [50]")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    help="most likely tokens of this total probability [1: all]",
)
@click.option(
    "--seed",
    type=Count(-(2**63), 2**64 - 1),
    default=0,
    help="seed of the random choice [0]",
)
@click.option("--step", type=Count(0), help="checkpoint step [the newest valid]")
@click.option("--image", type=types.WORD, help=f"image with gptddp [the job's, else {IMAGE}]")
@click.option("--memory", type=types.WORD, help="memory limit of the pod [the job's, else 4Gi]")
@click.option(
    "--runs",
    type=types.WORD,
    metavar="CLAIM[/PATH]",
    help="volume with the run [the job's, else runs]",
)
@click.option(
    "--data",
    type=types.WORD,
    metavar="CLAIM",
    help="volume with the dataset [the job's, else data]",
)
@click.option("--timeout", type=types.SECONDS, default=300, help="time limit: exit code 124 [5m]")
@pod_options
@job_options
@click.pass_context
def sample(
    ctx: click.Context,
    cluster: "Cluster",
    name: str,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    step: int | None,
    image: str | None,
    memory: str | None,
    runs: str | None,
    data: str | None,
    timeout: float,
    job: "JobSpec",
) -> None:
    """Print text from a checkpoint of a job.

    The job may be training or have ended. `gptddp sample` runs in a short Job on the job's volumes;
    the Job is deleted afterwards. If the job was deleted, name the volume of its run with --runs.
    With --local, `gptddp sample` runs on this machine.

    \b
    gptddp-k8s sample demo --prompt "Once upon" --tokens 100
    """
    given = {"prompt": prompt, "tokens": tokens, "temperature": temperature}
    given |= {"top-k": top_k, "top-p": top_p, "seed": seed}
    given |= {} if step is None else {"step": step}
    options = [f"--{key}={value}" for key, value in given.items()]
    own = {"image": image, "memory": memory, "runs": runs, "data": data}
    if cluster.local:
        ctx.exit(_sample_locally(cluster, name, options, own))
    from gptddp.k8s.act import short_job
    from gptddp.k8s.render.short_job_manifest import sample_job

    live = cluster.get("PyTorchJob", name)
    batch_job = sample_job(live, dataclasses.replace(job, name=name), options, own)
    short_job.sample(cluster, name, batch_job, note, click.echo, timeout)


def _sample_locally(cluster: Any, name: str, options: list[str], own: dict[str, Any]) -> int:
    """Run `gptddp sample` here; returns its exit code."""
    from gptddp.k8s.local import act

    if given := [f"--{key}" for key, value in own.items() if value]:
        raise click.UsageError(f"{given[0]} has no meaning with --local: leave it out")
    return act.sample(cluster, name, options)


COMMANDS = (prepare, sample)
