"""The `gptddp` command. Commands import what they need when they run, so that --help is quick."""

import json
import sys
from pathlib import Path
from typing import Any

try:
    import click
except ModuleNotFoundError as error:
    sys.exit(f"gptddp needs the package {error.name}: pip install 'gptddp[train]'")

from gptddp import __version__
from gptddp.errors import ConfigError, GptddpError, visible, visible_lines
from gptddp.files import FULL, MISPLACED, explain, may_pass
from gptddp.inference.model_commands import evaluate, sample
from gptddp.prepare.commands import prepare


class _Group(click.Group):
    """A command that meets a user's mistake ends with a message and an exit code.

    An error of a volume that may pass, or is full, is exit code 1; a folder in a file's place, 2.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # click's own exit code is 1, which says something else here
            click.echo("Aborted!", err=True)
            ctx.exit(130)
        except GptddpError as error:
            click.echo(f"Error: {visible_lines(error)}", err=True)
            ctx.exit(error.exit_code)
        except OSError as error:
            if error.errno in MISPLACED:
                click.echo(f"Error: {visible_lines(explain(error))}", err=True)
                ctx.exit(2)
            if error.errno in FULL:  # also of stdout
                click.echo(f"Error: {visible_lines(error)}: make room there first", err=True)
                ctx.exit(1)
            if not may_pass(error):
                raise
            click.echo(f"Error: {error}: give the command again when the volume is back", err=True)
            ctx.exit(1)


@click.group(cls=_Group)
@click.version_option(__version__, prog_name="gptddp")
def cli() -> None:
    """Pre-train GPT language models with PyTorch DDP."""


def _run_dir(run: Path) -> Path:
    """The run directory; ConfigError for another folder, which would look like an empty run."""
    from gptddp.run.directory import is_run

    if not is_run(run):
        fix = "give the folder that --run-dir has named"
        raise ConfigError(f"{run} is not a run directory, it has neither ledger nor log: {fix}")
    return run


@cli.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS]")
@click.pass_context
def train(ctx: click.Context, args: tuple[str, ...]) -> None:
    """Train, or continue, a run: every field of the configuration is a flag.

    \b
    gptddp train --data data --run-dir runs/first
    """
    from gptddp import flags, live
    from gptddp.distributed.report import shown

    flags.from_args(args)  # --help and a mistake are answered before torch is loaded
    with shown():
        live.phase("loading torch")
        from gptddp.train import main

        ctx.exit(main(args))


for command in (prepare, sample, evaluate):
    cli.add_command(command)


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Read every byte and compare it with its hash.")
@click.option(
    "--export",
    "out",
    type=click.Path(path_type=Path),
    metavar="OUT",
    help="Write a checkpoint's model for Hugging Face's transformers, as a GPT-2, Llama or Qwen 3, "
    "to the new folder OUT.",
)
@click.option(
    "--step",
    type=int,
    metavar="N",
    help="With --export: step of the checkpoint. [default: newest valid]",
)
@click.option("--data", metavar="DIR", help="Dataset with the tokenizer. [default: the run's]")
@click.pass_context
def checkpoints(
    ctx: click.Context,
    run: Path,
    verify: bool,
    out: Path | None,
    step: int | None,
    data: str | None,
) -> None:
    """List the checkpoints of RUN, newest first; exit code 4 if none can be used.

    Nothing here disturbs a job that is running.

    \b
    gptddp checkpoints runs/first --verify
    gptddp checkpoints runs/first --export model
    """
    from gptddp.checkpoint.retention import list_checkpoints

    if step is not None and not out:
        raise ConfigError("--step says which checkpoint --export writes: give both")
    if out:
        from gptddp.inference.export import export

        step = export(_run_dir(run), out, data, step)
        click.echo(f"step {step} is exported to {out}", err=True)
        return
    found = list_checkpoints(_run_dir(run), full=verify)
    for it in found:
        size = f"{it.nbytes / 1e6:.1f} MB"
        click.echo(visible(f"{it.name:32} {it.state:12} {size:>10}  {it.reason}".rstrip()))
    if not found:
        click.echo(f"{run} has no checkpoints", err=True)
    if not any(it.ok for it in found):
        ctx.exit(4)


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.pass_context
def log(ctx: click.Context, run: Path) -> None:
    """Print the history of RUN as JSON lines: each step once, as its newest life logged it.

    Exit code 1, and what is wrong on stderr, where steps are missing or lines are not this run's.

    \b
    gptddp log runs/first | tail -1
    """
    from gptddp.run import log_check
    from gptddp.run.history import logged

    it = log_check.LogCheck(_run_dir(run))
    for generation, line in logged(run):
        it.add(generation, line)
        click.echo(json.dumps(line))
    if wrong := it.found():
        click.echo(visible_lines(log_check.not_whole(run, wrong)), err=True)
        ctx.exit(1)


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--data", default="", metavar="DIR", help="Dataset. [default: the run's]")
@click.option(
    "--whole", is_flag=True, help="All steps from the seed, not from the oldest checkpoint."
)
@click.pass_context
def audit(ctx: click.Context, run: Path, data: str, whole: bool) -> None:
    """Compute the steps of RUN once more, and compare every bit with its log and checkpoints.

    Exit code 0 when all is the same, 1 at the first difference, 2 when this machine cannot say.

    \b
    gptddp audit runs/first --whole
    """
    from gptddp.audit import audit as recompute
    from gptddp.audit import describe

    report = recompute(_run_dir(run), data, whole, lambda what: click.echo(what, err=True))
    click.echo(visible_lines(describe(report)))
    ctx.exit(report.exit_code)


@cli.command()
@click.argument("run_a", type=click.Path(path_type=Path))
@click.argument("run_b", type=click.Path(path_type=Path))
@click.pass_context
def fingerprints(ctx: click.Context, run_a: Path, run_b: Path) -> None:
    """Compare what two runs trained on, step by step; exit code 1 at the first difference.

    Exit code 0 when all steps that both have logged are the same, 2 when they cannot be compared.

    \b
    gptddp fingerprints runs/undisturbed runs/killed
    """
    from gptddp.fingerprints import compare, describe
    from gptddp.run.log_check import not_whole

    result = compare(_run_dir(run_a), _run_dir(run_b))
    for it in (result.a, result.b):
        if it.wrong:
            click.echo(visible_lines(not_whole(it.run, it.wrong)), err=True)
    click.echo(visible_lines(describe(result)))
    ctx.exit(0 if result.difference is None else 1)


@cli.command()
@click.argument("runs", type=click.Path(path_type=Path), metavar="RUN...", nargs=-1, required=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default="report.html",
    show_default=True,
    metavar="FILE",
    help="File of the page; an older page is replaced.",
)
def report(runs: tuple[Path, ...], out: Path) -> None:
    """Draw runs on one page that needs no network: curves, restarts, where the time went.

    Nothing of a run is changed, and it may be going on. Several runs are drawn over each other.

    \b
    gptddp report runs/first
    gptddp report runs/undisturbed runs/killed --out both.html
    """
    from gptddp.report.page import report as draw

    nbytes, drawn = draw([_run_dir(run) for run in runs], out)
    click.echo(f"{nbytes / 1e6:.1f} MB, of {drawn} run{'s' * (drawn > 1)}:", err=True)
    click.echo(visible(out))
