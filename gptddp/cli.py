"""The `gptddp` command. Commands import what they need when they run, so that --help is quick."""

import contextlib
import csv
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import click
except ModuleNotFoundError as error:
    sys.exit(f"gptddp needs the package {error.name}: pip install 'gptddp[train]'")

from gptddp import __version__, live, units
from gptddp.click_types import HELP, Summaries
from gptddp.config import TRACKERS
from gptddp.distributed.report import load_torch, shown
from gptddp.errors import ConfigError, GptddpError, visible, visible_lines
from gptddp.files import FULL, MISPLACED, explain, may_pass
from gptddp.inference.model_commands import evaluate, sample
from gptddp.prepare.commands import prepare
from gptddp.sweep import sweep


class _Group(Summaries):
    """Turn a user's mistake into a message and an exit code.

    Exit code 1: the volume is full, or may come back. Exit code 2: a folder is in a file's place.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # click's own exit code is 1, which has another meaning here
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


@click.group(cls=_Group, context_settings=HELP)
@click.version_option(__version__, prog_name="gptddp")
def cli() -> None:
    """Pre-train GPT language models with PyTorch DDP."""


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Show on a terminal what the command reads, until the block ends."""
    with live.shown():
        live.phase(f"reading {what}", drawn_only=True)
        yield


def _run_dir(run: Path) -> Path:
    """Return the run directory. ConfigError for another folder: it would look like an empty run."""
    from gptddp.run.directory import is_run

    if not is_run(run):
        fix = "give the folder that was given as --run-dir"
        raise ConfigError(f"{run} is not a run directory, it has neither ledger nor log: {fix}")
    return run


@cli.command(context_settings={"ignore_unknown_options": True}, add_help_option=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED, metavar="[FLAGS]")
@click.pass_context
def train(ctx: click.Context, args: tuple[str, ...]) -> None:
    """Train a run, or continue one: see `gptddp train --help`.

    \b
    gptddp train --data data --run-dir runs/first
    """
    from gptddp import flags

    flags.from_args(args, ctx.command_path)  # handles --help and mistakes without torch
    with shown():
        load_torch()
        from gptddp.train import main

        ctx.exit(main(args))


for command in (prepare, sweep, sample, evaluate):
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
    """List the checkpoints of RUN, newest first, or export one.

    Exit code 4 if no checkpoint can be used. A running job is not disturbed.

    \b
    gptddp checkpoints runs/first --verify
    gptddp checkpoints runs/first --export model
    """
    from gptddp.checkpoint.retention import list_checkpoints

    if step is not None and not out:
        raise ConfigError("--step selects the checkpoint for --export: give both")
    if out:
        with shown():
            load_torch()
            from gptddp.inference.export import export

            step = export(_run_dir(run), out, data, step)
        click.echo(f"step {step} is exported to {out}", err=True)
        return
    with _reading("the checkpoints"):
        found = list_checkpoints(_run_dir(run), full=verify)
    for it in found:
        size = units.size(it.nbytes)
        click.echo(visible(f"{it.name:32} {it.state:12} {size:>10}  {it.reason}".rstrip()))
    if not found:
        click.echo(f"{run} has no checkpoints", err=True)
    if not any(it.ok for it in found):
        ctx.exit(4)


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.pass_context
def log(ctx: click.Context, run: Path) -> None:
    """Print the history of RUN as JSON lines, each step once.

    Exit code 1, and the reason on stderr, if steps are missing or lines belong to another run.

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
@click.option(
    "--to",
    required=True,
    type=click.Choice(TRACKERS),
    help="Tracker; its own environment variables configure it.",
)
@click.option("--follow", is_flag=True, help="Continue until the standard input ends.")
def track(run: Path, to: str, follow: bool) -> None:
    """Send the missing steps of RUN to a tracker.

    It sends the steps up to the newest checkpoint, or all steps of a finished run, each once.
    Exit code 1 if the tracker cannot be reached.

    \b
    gptddp track runs/first --to tensorboard
    """
    from gptddp.track import feed
    from gptddp.track.trackers import check_installed

    check_installed(to)
    if not follow:
        click.echo(f"sending the steps of {run} to {to}", err=True)
    over = feed.rank_0_ends if follow else lambda _: True
    click.echo(f"{to} has the steps up to {feed.track(_run_dir(run), to, over)}", err=not follow)


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--data", default="", metavar="DIR", help="Dataset. [default: the run's]")
@click.option(
    "--whole", is_flag=True, help="All steps from the seed, not from the oldest checkpoint."
)
@click.pass_context
def audit(ctx: click.Context, run: Path, data: str, whole: bool) -> None:
    """Compute RUN's steps again, and compare every bit.

    Exit code 0: log and checkpoints have the same bits, 1: a difference, 2: no comparison.

    \b
    gptddp audit runs/first --whole
    """
    load_torch()
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
    """Compare the steps of two runs.

    Exit code 0: the steps that both have logged are the same, 1: a difference, 2: no comparison.

    \b
    gptddp fingerprints runs/undisturbed runs/killed
    """
    from gptddp.fingerprints import compare, describe
    from gptddp.run.log_check import not_whole

    with _reading("both logs"):
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
@click.option("--watch", is_flag=True, help="Keep the page fresh until the runs have ended.")
def report(runs: tuple[Path, ...], out: Path, watch: bool) -> None:
    """Draw runs on one page: curves, restarts, where time went.

    The runs are not changed; they may still be training. Of several runs, a table comes first,
    sorted by validation loss; their curves share one chart.

    \b
    gptddp report runs/first
    gptddp report runs/undisturbed runs/killed --out both.html
    """
    with _reading(units.many(len(runs), "run")):
        from gptddp.report import page

        nbytes, states = page.report([_run_dir(run) for run in runs], out)
    click.echo(f"{units.size(nbytes)}, of {units.many(len(states), 'run')}:", err=True)
    click.echo(visible(out))
    if watch:
        click.echo("updated every few seconds until the runs end; Ctrl-C stops it", err=True)
        page.watch(runs, out)


@cli.command()
@click.argument(
    "folders", type=click.Path(path_type=Path), metavar="FOLDER...", nargs=-1, required=True
)
@click.option("-o", "--output", type=click.Choice(["text", "json", "csv"]), default="text",
              show_default=True, help="Format; json and csv are for programs.")  # fmt: skip
def runs(folders: tuple[Path, ...], output: str) -> None:
    """Compare the runs in FOLDER, the best validation first.

    A column for each setting that differs. FOLDER is a run, or has runs up to three levels below.
    The runs may still be training.

    \b
    gptddp runs runs
    """
    with _reading("the runs"):
        from gptddp.report import side_by_side

        found = {it.resolve(): it for folder in folders for it in side_by_side.find(folder)}
        if not found:
            where = " and ".join(map(str, folders))
            raise ConfigError(f"{where}: no run was found: give a folder with run directories")
        table = side_by_side.side_by_side(list(found.values()))
    if output == "text":
        click.echo(side_by_side.as_text(table, shutil.get_terminal_size((0, 0)).columns))
    elif output == "json":
        click.echo(json.dumps(table.rows, indent=2))
    else:
        fields = dict.fromkeys(name for row in table.rows for name in row)
        writer = csv.DictWriter(sys.stdout, list(fields))
        writer.writeheader()
        writer.writerows({name: _cell(it) for name, it in row.items()} for row in table.rows)


def _cell(it: object) -> object:
    """A value that no spreadsheet takes for a formula and no terminal for a control character."""
    return "'" * it.startswith(("=", "+", "-", "@")) + visible(it) if isinstance(it, str) else it
