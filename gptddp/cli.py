"""The `gptddp` command. Commands import what they need when they run, so that --help is quick."""

import json
import sys
from pathlib import Path
from typing import Any

import click

from gptddp import __version__
from gptddp.errors import ConfigError, GptddpError, visible, visible_lines
from gptddp.files import FULL, MISPLACED, exists, explain, may_pass
from gptddp.inference.commands import evaluate, sample


class _Group(click.Group):
    """Ends a command that meets a user's mistake with its message and exit code.

    An error of a volume that may pass, or is full, is exit code 1; what is in a file's place, 2.
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
    """The run directory, or an error: an empty answer would look like an empty run."""
    if not exists(run / "config.json"):
        raise ConfigError(f"{run} is not a run directory: it has no config.json")
    return run


@cli.command()
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option("--out", metavar="DIR", required=True, help="Folder to make the dataset in.")
@click.option(
    "--text-field",
    default="text",
    show_default=True,
    metavar="NAME",
    help="Field of JSONL and column of parquet that holds the text.",
)
@click.option(
    "--tokens-field",
    metavar="NAME",
    help="Column of parquet that holds lists of token ids, in place of text.",
)
@click.option(
    "--tokenizer",
    default="bpe",
    show_default=True,
    metavar="bpe|bytes|FILE",
    help="Train a byte-level BPE, use plain bytes, or take a tokenizer.json.",
)
@click.option(
    "--vocab-size",
    type=int,
    metavar="N",
    help="Tokens to train. [default: 2048 below 16 MiB of text, 32768 from 1 GiB, else 4096]",
)
@click.option(
    "--val-fraction",
    type=float,
    default=0.01,
    show_default=True,
    metavar="F",
    help="Part of the documents that is held apart for validation; at least one document.",
)
@click.option(
    "--val",
    multiple=True,
    metavar="SOURCE",
    help="File or folder of the validation split, in place of a part of all. May be repeated.",
)
@click.option(
    "--seed",
    type=int,
    default=1337,
    show_default=True,
    metavar="N",
    help="Seed of the one global shuffle.",
)
@click.option(
    "--include",
    multiple=True,
    metavar="GLOB",
    help="Of folders, read only these files, as in '*.py'. May be repeated.",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="GLOB",
    help="Leave out these files and folders of a folder. May be repeated.",
)
@click.option("--keep-copies", is_flag=True, help="Keep all copies of a document, not one.")
@click.option(
    "--on-bad",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="At a record that cannot be used: end, or list it in bad.jsonl and go on.",
)
@click.option(
    "--max-bad", type=int, metavar="N", help="With --on-bad skip, end after so many. [default: 100]"
)
def prepare(sources: tuple[str, ...], out: str, val: tuple[str, ...], **options: Any) -> None:
    """Turn text into a dataset: parquet shards, a tokenizer, a validation split.

    SOURCE is a text file, a .jsonl or .json file (also .gz, .zst, .bz2), a .parquet file, or a
    folder of them. Every other file of a folder is text, and skipped if it is not UTF-8; hidden
    files, READMEs and licenses are left out. Where its files are named train, validation and test,
    these are the splits, and test is left out. Empty documents and exact copies are dropped.

    The same command goes on where a killed one was.

    \b
    gptddp prepare books/ more.jsonl.zst --out data
    gptddp prepare src/ --include '*.py' --exclude tests --vocab-size 4096 --out data
    """
    from gptddp.prepare import summary
    from gptddp.prepare.build import prepare as run
    from gptddp.prepare.progress_bar import ProgressBar
    from gptddp.prepare.recipe import Settings

    with ProgressBar(sys.stderr) as bar:
        dataset = run(sources, out, Settings(**options), bar, val)
    click.echo(summary.prepared(dataset))


@cli.command()
@click.argument("dataset", metavar="DATASET")
@click.option("--out", metavar="DIR", required=True, help="Folder to make the new dataset in.")
def repack(dataset: str, out: str) -> None:
    """Rewrite a dataset whose row groups are huge: the same documents in the same order.

    The new dataset is whole or absent; a killed repack is started again by the same command.

    \b
    gptddp repack data --out data-small-groups
    """
    from gptddp.prepare import summary
    from gptddp.prepare.progress_bar import ProgressBar
    from gptddp.prepare.repack import repack as run

    with ProgressBar(sys.stderr) as bar:
        made = run(dataset, out, bar)
    click.echo(summary.repacked(made))


@cli.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS]")
@click.pass_context
def train(ctx: click.Context, args: tuple[str, ...]) -> None:
    """Train, or continue, a run: every field of the configuration is a flag.

    \b
    gptddp train --data data --run-dir runs/first
    """
    from gptddp import flags

    flags.from_args(args)  # --help and a mistake are answered before torch is loaded
    from gptddp.train import main

    ctx.exit(main(args))


cli.add_command(sample)
cli.add_command(evaluate)


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--verify", is_flag=True, help="Read every byte and compare it with its hash.")
@click.option("--prune", is_flag=True, help="First delete all but the newest valid ones.")
@click.option(
    "--keep", type=click.IntRange(1), metavar="N", help="So many stay with --prune. [the run's]"
)
@click.option(
    "--export",
    "out",
    type=click.Path(path_type=Path),
    metavar="OUT",
    help="Write the newest valid one's model as a GPT-2 of Hugging Face's transformers to the new "
    "folder OUT, or to OUT.safetensors without tokenizer and configuration.",
)
@click.option("--data", metavar="DIR", help="Dataset with the tokenizer. [default: the run's]")
@click.pass_context
def checkpoints(
    ctx: click.Context,
    run: Path,
    verify: bool,
    prune: bool,
    keep: int | None,
    out: Path | None,
    data: str | None,
) -> None:
    """List the checkpoints of RUN, newest first; exit code 4 if none can be used.

    Nothing here disturbs a job that is running.

    \b
    gptddp checkpoints runs/first --verify
    gptddp checkpoints runs/first --export model
    """
    from gptddp.checkpoint.retention import list_checkpoints

    if keep and not prune:
        raise ConfigError("--keep says how many stay with --prune: give both")
    if out:
        from gptddp.inference.export import export

        click.echo(f"step {export(_run_dir(run), out, data)} is exported to {out}", err=True)
        return
    if prune:
        _prune(_run_dir(run), keep)
    found = list_checkpoints(_run_dir(run), full=verify)
    for it in found:
        size = f"{it.nbytes / 1e6:.1f} MB"
        click.echo(visible(f"{it.name:32} {it.state:12} {size:>10}  {it.reason}".rstrip()))
    if not found:
        click.echo(f"{run} has no checkpoints", err=True)
    if not any(it.ok for it in found):
        ctx.exit(4)


def _prune(run: Path, keep: int | None) -> None:
    """Delete all but the newest valid checkpoints; `keep`: how many, None for the run's number."""
    from gptddp.checkpoint.retention import prune_by_hand
    from gptddp.config import Config, with_preset
    from gptddp.run.directory import config_of

    config = with_preset(config_of(run) or Config(), accelerator=False)
    for name in prune_by_hand(run, keep or config.keep, config.keep_every):
        click.echo(f"deleted {name}", err=True)


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
        click.echo(visible_lines(log_check.told(run, wrong)), err=True)
        ctx.exit(1)


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--data", default="", metavar="DIR", help="The dataset; by default the run's own.")
@click.option(
    "--whole", is_flag=True, help="All steps from the seed, not from the oldest checkpoint."
)
@click.option(
    "--init-from",
    default="",
    metavar="DIR",
    help="The folder that the run was begun from; by default where it was.",
)
@click.pass_context
def audit(ctx: click.Context, run: Path, data: str, whole: bool, init_from: str) -> None:
    """Compute the steps of RUN once more, and compare every bit with its log and checkpoints.

    Exit code 0 when all is the same, 1 at the first difference, 2 when that cannot be told here.

    \b
    gptddp audit runs/first --whole
    """
    from gptddp.audit import audit as recompute
    from gptddp.audit import describe

    def tell(what: str) -> None:
        click.echo(what, err=True)

    report = recompute(_run_dir(run), data, whole, tell, init_from)
    click.echo(visible_lines(describe(report)))
    ctx.exit(report.exit_code)


@cli.command()
@click.argument("run_a", type=click.Path(path_type=Path))
@click.argument("run_b", type=click.Path(path_type=Path))
@click.pass_context
def fingerprints(ctx: click.Context, run_a: Path, run_b: Path) -> None:
    """Compare what two runs trained on, step by step; exit code 1 at the first difference.

    Exit code 0 when all steps that both have logged are the same, 2 when that cannot be told.

    \b
    gptddp fingerprints runs/undisturbed runs/killed
    """
    from gptddp.fingerprints import compare, describe
    from gptddp.run.log_check import told

    result = compare(_run_dir(run_a), _run_dir(run_b))
    for run, wrong in zip(result.runs, result.wrong, strict=True):
        if wrong:
            click.echo(visible_lines(told(run, wrong)), err=True)
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
    help="The page; an older one is replaced.",
)
def report(runs: tuple[Path, ...], out: Path) -> None:
    """Draw runs on one page that needs no network: curves, restarts, where the time went.

    Nothing of a run is changed, and it may be going on. Several runs are drawn over each other.

    \b
    gptddp report runs/first
    gptddp report runs/undisturbed runs/killed --out both.html
    """
    from gptddp.report.page import report as draw

    nbytes, drawn = draw(runs, out, lambda what: click.echo(visible(what), err=True))
    click.echo(f"{nbytes / 1e6:.1f} MB, of {drawn} run{'s' * (drawn > 1)}:", err=True)
    click.echo(visible(out))
