"""Commands that run something beside the training, in a short Job: prepare and sample."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptddp import __version__
from gptddp.errors import JobFailed
from gptddp.k8s.cli import types
from gptddp.k8s.cli.command import Command, note
from gptddp.k8s.cli.options import (
    cluster_options,
    context_options,
    name_argument,
    namespace_option,
    pod_options,
    refuse_timeout,
    wait_options,
)

if TYPE_CHECKING:
    from gptddp.k8s.cluster import Cluster
    from gptddp.k8s.objects import Object
    from gptddp.k8s.render.short_job import ClaimPath
    from gptddp.k8s.render.spec import JobSpec

IMAGE = f"gptddp:{__version__}"


def _prepare_flags() -> list[str]:
    from gptddp.prepare.commands import prepare as command

    return [name for param in command.params for name in param.opts]


@click.command(cls=Command, of="`gptddp prepare`", takes=_prepare_flags)
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
@click.option(
    "--read-only-source", is_flag=True, help="mount its claim read-only on the node: ReadOnlyMany"
)
@click.option("--name", default="prepare", help="name of the Job [prepare]")
@click.option("--image", help=f"image with gptddp [{IMAGE}]")
@click.option("--cpu", default="1", help="CPUs of the pod, request and limit [1]")
@click.option("--memory", default="4Gi", help="memory of the pod, request and limit [4Gi]")
@namespace_option
@context_options
@click.option("--dry-run", is_flag=True, help="print the Job, and ask no cluster")
@wait_options(good="done", logs="its log")
@pod_options
@click.argument("options", nargs=-1, metavar="[-- PREPARE OPTIONS]")
def prepare(
    source: str,
    data: str | None,
    read_only_source: bool,
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
    """Make a dataset in a volume of the cluster, from texts in a volume.

    A batch Job runs `gptddp prepare` with the options after `--`. The same command again changes
    nothing while the Job runs or when it is done; it runs a failed one again.

    \b
    gptddp-k8s prepare --source texts/books --follow -- --vocab-size 4096
    """
    refuse_timeout(timeout, wait or follow)
    if dry_run and (wait or follow):
        raise click.UsageError("--dry-run asks no cluster: leave out --wait and --follow")
    image, data = (job.image if image is None else image), (job.data if data is None else data)
    pod = {"image": image, "cpu": cpu, "memory": memory, "asked": job.pod}
    pod |= {"read_only_source": read_only_source}
    batch_job, dataset = _prepare_job(source, data, name, options, **pod)
    if dry_run:
        return _print(batch_job, namespace)
    from gptddp.k8s.cluster import connect

    cluster = connect(namespace, kubeconfig, context)
    created = _submit_prepare(cluster, batch_job)
    if wait or follow:
        _wait_for_prepare(cluster, name, follow, timeout)
        note(f"next: gptddp-k8s submit --data {dataset}{cluster.flags}")
    else:
        _say_progress(cluster, name, created)


def _prepare_job(
    source: str, data: str, name: str, options: tuple[str, ...], **pod: Any
) -> tuple["Object", "ClaimPath"]:
    """The Job, and where its dataset will be; `pod`: what else `prepare_job` takes."""
    from gptddp.k8s.render.short_job import ClaimPath, prepare_job, prepare_source

    texts, dataset = ClaimPath.parse("--source", source), ClaimPath.parse("--data", data)
    _check_options(options, prepare_source(texts, dataset))
    return prepare_job(name, texts, dataset, options, **pod), dataset


def _print(job: "Object", namespace: str | None) -> None:
    from gptddp.k8s.render.manifest import to_yaml

    if namespace:
        job["metadata"]["namespace"] = namespace
    click.echo(to_yaml([job]), nl=False)


def _submit_prepare(cluster: "Cluster", job: "Object") -> bool:
    """Create the Job, unless the same one is there; did this call create it?"""
    from gptddp.k8s.act import short_job
    from gptddp.k8s.cluster import resource

    created = short_job.submit(cluster, job, note)
    name = job["metadata"]["name"]
    click.echo(f"{resource('Job', name)} {'created' if created else 'unchanged'}")
    return created


def _say_progress(cluster: "Cluster", name: str, created: bool) -> None:
    from gptddp.k8s.act import short_job

    if not created:
        live = cluster.get("Job", name)
        note(f"the very same Job is {'done' if live and short_job.done(live) else 'running'}")
    note("next: the same command with --follow shows its log and how it ends")


def _wait_for_prepare(cluster: "Cluster", name: str, follow: bool, timeout_s: float | None) -> None:
    """Until the Job has ended, its log on stdout if asked for; raises JobFailed, TimedOut."""
    from gptddp.k8s.act import short_job

    write = click.echo if follow else None
    if short_job.watch(cluster, name, note, write=write, timeout_s=timeout_s) == short_job.FAILED:
        reason = short_job.reason(cluster, name).replace("--out", "--data")
        raise JobFailed(f"the Job {name} failed: {reason}")


def _check_options(options: tuple[str, ...], source: str) -> None:
    """Refuse here what `gptddp prepare` would refuse in the pod; `source`: the texts there."""
    from gptddp.prepare.commands import prepare as command

    if any(option.partition("=")[0] == "--out" for option in options):
        raise click.UsageError("--out after --: name the place of the dataset with --data")
    try:
        made = command.make_context("prepare", [".", "--out", ".", *options])
    except click.UsageError as error:
        raise click.UsageError(f"after --: {error.format_message()}") from None
    sources = made.params["sources"][1:]
    if sources:
        raise click.UsageError(f"unexpected argument {sources[0]!r}: name texts with --source")
    mount = "/" + source.split("/")[1]
    for val in made.params["val"]:
        if not val.startswith(f"{mount}/"):
            raise click.UsageError(
                f"--val {val} after --: the pod has the volume of --source at {mount}: give a path "
                f"there, such as {source}/val.jsonl"
            )


@click.command()
@name_argument
@click.option("--prompt", default="", metavar="TEXT", help="text to go on from")
@click.option("--tokens", type=click.IntRange(1), default=200, help="tokens to make [200]")
@click.option(
    "--temperature", type=click.FloatRange(0), default=0.8, help="0: likeliest token [0.8]"
)
@click.option("--top-k", type=click.IntRange(0), default=50, help="likeliest tokens; 0: all [50]")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    help="of these those that come to this probability [1: all]",
)
@click.option(
    "--seed",
    type=click.IntRange(-(2**63), 2**64 - 1),
    default=0,
    help="another seed, other text [0]",
)
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
@click.option("--timeout", type=types.SECONDS, default=300, help="exit code 124 after it [300]")
@pod_options
@cluster_options
def sample(
    cluster: "Cluster",
    name: str,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    image: str | None,
    memory: str | None,
    runs: str | None,
    data: str | None,
    timeout: float,
    job: "JobSpec",
) -> None:
    """Print text from the newest checkpoint of a job.

    The job may train or have ended. `gptddp sample` runs in a short Job on the job's volumes, which
    is deleted then. A job that is gone has left its run on a volume: name that with --runs.

    \b
    gptddp-k8s sample demo --prompt "Once upon" --tokens 100
    """
    from gptddp.k8s.act import sampling

    given = {"prompt": prompt, "tokens": tokens, "temperature": temperature}
    given |= {"top-k": top_k, "top-p": top_p, "seed": seed}
    options = [f"--{key}={value}" for key, value in given.items()]
    own = {"image": image, "memory": memory, "runs": runs, "data": data}
    batch_job = sampling.job(cluster, name, options, job, own)
    click.echo(sampling.run(cluster, name, batch_job, note, timeout), nl=False)


COMMANDS = (prepare, sample)
