"""The `gptddp-k8s` command: data on stdout, notes on stderr, exit code 2 for what is refused.

Nothing here imports torch or a Kubernetes client, and what `--help` does not need is imported
where it is used, so that the command answers in a blink.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from gptddp import __version__, config
from gptddp.errors import GptddpError
from gptddp.k8s import spec
from gptddp.k8s.spec import JobSpec


class Command(click.Command):
    """A command whose arguments after `--` are the trainer's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["args"] = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            if name in config.FIELDS:
                raise click.UsageError(
                    f"{error.option_name} is an option of the trainer: put it after --, as in "
                    f"`gptddp-k8s {ctx.info_name} ... -- {error.option_name} ...`"
                ) from None
            raise


class Group(click.Group):
    """Turns our errors into a message on stderr and their exit code; no traceback."""

    command_class = Command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GptddpError as error:
            for line in str(error).splitlines():
                click.echo(line if line.startswith(" ") else f"error: {line}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="gptddp-k8s %(version)s")
def cli() -> None:
    """Train a GPT on Kubernetes: render, submit and run elastic PyTorchJobs."""


def _pair(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> Any:
    """`NAME=VALUE` options as pairs."""
    for value in values:
        if "=" not in value.lstrip("="):
            raise click.BadParameter(f"{value!r} is not of the form {param.metavar}")
    return tuple(tuple(value.split("=", 1)) for value in values)


def job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Every field of JobSpec as a flag, `-f job.toml`, and the trainer's arguments after `--`."""
    command = click.argument("train_args", nargs=-1, metavar="[-- TRAINER OPTIONS]")(command)
    for name, field in reversed(spec.FIELDS.items()):
        help = field.metadata["help"]
        names = [spec.flag(name), *(["-n"] if name == "namespace" else [])]
        if name == "env":
            option = click.option(
                *names, multiple=True, metavar="NAME=VALUE", callback=_pair, help=help
            )
        else:
            known = f" [default: {field.default}]" if field.default is not None else ""
            option = click.option(*names, name, type=spec.kind(name), help=help + known)
        command = option(command)
    file = click.option(
        "-f", "--file", type=click.Path(path_type=Path), help="job.toml: [job] for these options,"
        " [train] for the trainer's; flags win",
    )  # fmt: skip
    return file(command)


def _load(options: dict[str, Any]) -> JobSpec:
    """The spec of a command's options, with its notes printed; raises ConfigError."""
    from gptddp.k8s import rules

    file, train_args = options.pop("file"), options.pop("train_args")
    job = spec.load(file, options, train_args)
    rules.refuse(rules.check_spec(job))
    for note in rules.warnings(job):
        click.echo(f"warning: {note}", err=True)
    return job


def _objects(job: JobSpec) -> list[dict[str, Any]]:
    """What `render` prints and `submit` runs."""
    from gptddp.k8s import admission, manifest, rules

    objects = manifest.objects(job)
    rules.refuse(admission.check_job(objects[-1]))
    return objects


@cli.command()
@job_options
@click.option(
    "-o", "--output", type=click.Choice(["yaml", "json"]), default="yaml", help="format [yaml]"
)
def render(output: str, **options: Any) -> None:
    """Print the manifest of a job: the same bytes for the same options, no cluster needed.

    \b
    gptddp-k8s render --replicas 4 -- --steps 1000 | kubectl apply -f -
    """
    from gptddp.k8s import manifest

    objects = _objects(_load(options))
    text = manifest.to_yaml(objects) if output == "yaml" else manifest.to_json(objects)
    click.echo(text, nl=False)


@cli.command()
@job_options
@click.option("--local", is_flag=True, help="run the job on this machine, a process per pod")
@click.option(
    "--local-dir", type=click.Path(path_type=Path, file_okay=False), default=Path("gptddp-local"),
    help="folder of local jobs and volumes [gptddp-local]",
)  # fmt: skip
@click.option(
    "--volume", multiple=True, metavar="CLAIM=FOLDER", callback=_pair,
    help="folder of a claim of a local job [LOCAL_DIR/volumes/CLAIM]; may be repeated",
)  # fmt: skip
@click.option("-v", "--verbose", is_flag=True, help="show the pods' logs of a local job")
@click.pass_context
def submit(
    ctx: click.Context, /, local: bool, local_dir: Path, volume: Any, verbose: bool, **options: Any
) -> None:
    """Start a job; the same command again continues it.

    With --local, each pod of the manifest runs as a process on this machine; memory limits and
    read-only mounts are not enforced. Exit code 0: the job succeeded, 100: it failed, 130: it was
    stopped, by Ctrl-C for example.

    \b
    gptddp prepare SOURCE... --out gptddp-local/volumes/data
    gptddp-k8s submit --replicas 4 --local -- --steps 400
    """
    objects = _objects(_load(options))
    if not local:
        import shlex

        args = shlex.join(ctx.meta["args"])
        raise click.UsageError(
            "submitting to a cluster is not in this version yet: add --local, or use "
            f"`gptddp-k8s render {args} | kubectl apply -f -`"
        )
    from gptddp.k8s import local as local_job

    gc.enable()
    folders = {claim: Path(folder) for claim, folder in volume}
    ctx.exit(local_job.run(objects, local_dir=local_dir, volumes=folders, verbose=verbose))
