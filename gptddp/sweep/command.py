"""The command `gptddp sweep`; it imports late, as `gptddp/cli.py`."""

import shutil
from pathlib import Path

import click

from gptddp.errors import ConfigError, visible_lines

_TRAIN = "gptddp.train_args"  # in the meta of the context: the words after --


class _Sweep(click.Command):
    """A command that keeps apart what stands after `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta[_TRAIN] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


@click.command(cls=_Sweep, context_settings={"ignore_unknown_options": True})
@click.argument(
    "swept", nargs=-1, type=click.UNPROCESSED, metavar="--FIELD A,B... -- [TRAIN OPTIONS]"
)
@click.option(
    "--run-dir",
    type=click.Path(path_type=Path),
    required=True,
    metavar="DIR",
    help="Folder of the sweep: each run gets a folder in it, such as DIR/lr-3e-3.",
)
@click.pass_context
def sweep(ctx: click.Context, run_dir: Path, swept: tuple[str, ...]) -> None:
    """Train one run for each value of a field, one after the other, and compare them.

    Before `--`: the fields that differ, with their values; of several fields, every combination.
    After it: options of `gptddp train`, for all runs. The same command again skips what is
    finished and continues the rest. Exit code 1 if a run has failed; the others are trained.

    \b
    gptddp sweep --run-dir runs/lr --lr 1e-3,3e-3,1e-2 -- --data data --steps 300
    """
    from gptddp.flags import from_args, texts
    from gptddp.report import side_by_side
    from gptddp.sweep import grid, one_by_one

    def say(text: str) -> None:
        click.echo(visible_lines(text), err=True)

    train_args = ctx.meta[_TRAIN]
    base = from_args(train_args)
    if base.run_dir:
        raise ConfigError("--run-dir is the folder of the sweep: give it once, before --")
    runs = grid.configurations(texts(swept), base, train_args)
    placed = one_by_one.prepare(run_dir, runs)
    failed, signal = one_by_one.train_all(placed, say)
    if signal:
        say("stopped; the same command continues")
        ctx.exit(128 + signal)
    table = side_by_side.side_by_side(list(side_by_side.find(run_dir)))
    click.echo(side_by_side.as_text(table, shutil.get_terminal_size((0, 0)).columns))
    for name, code in failed.items():
        say(f"{name} has failed with exit code {code}; the same command tries it again")
    ctx.exit(1 if failed else 0)
