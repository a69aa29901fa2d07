"""The `gptddp` command. Commands import what they need when they run, so that --help is quick."""

import sys
from typing import Any

import click

from gptddp import __version__
from gptddp.errors import GptddpError


class _Group(click.Group):
    """Ends a command that meets a user's mistake with its message and exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GptddpError as error:
            click.echo(f"Error: {error}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=_Group)
@click.version_option(__version__, prog_name="gptddp")
def cli() -> None:
    """Pre-train GPT language models with PyTorch DDP."""


@cli.command()
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option("--out", metavar="DIR", required=True, help="Folder to make the dataset in.")
@click.option(
    "--text-field", default="text", show_default=True, metavar="NAME",
    help="Field of JSONL and column of parquet that holds the text.",
)  # fmt: skip
@click.option(
    "--tokenizer", default="bpe", show_default=True, metavar="bpe|bytes|FILE",
    help="Train a byte-level BPE, use plain bytes, or take a tokenizer.json.",
)  # fmt: skip
@click.option(
    "--vocab-size", type=int, metavar="N",
    help="Tokens to train. [default: 2048 below 16 MiB of text, 32768 from 1 GiB, else 4096]",
)  # fmt: skip
@click.option(
    "--val-fraction", type=float, default=0.01, show_default=True, metavar="F",
    help="Part of the documents that is held apart for validation; at least one document.",
)  # fmt: skip
@click.option(
    "--seed", type=int, default=1337, show_default=True, metavar="N",
    help="Seed of the one global shuffle.",
)  # fmt: skip
@click.option(
    "--include", multiple=True, metavar="GLOB",
    help="Of folders, read only these files, as in '*.py'. May be repeated.",
)  # fmt: skip
@click.option(
    "--exclude", multiple=True, metavar="GLOB",
    help="Leave out these files and folders of a folder. May be repeated.",
)  # fmt: skip
def prepare(sources: tuple[str, ...], out: str, **options: Any) -> None:
    """Turn text into a dataset: parquet shards, a tokenizer, a validation split.

    SOURCE is a text file, a .jsonl file (also .gz, .zst, .bz2), a .parquet file, or a folder of
    them. Every other file of a folder is text, and skipped if it is not UTF-8; hidden ones are
    passed over. Empty documents and exact copies are dropped.

    \b
    gptddp prepare books/ more.jsonl.zst --out data
    gptddp prepare src/ --include '*.py' --exclude tests --vocab-size 4096 --out data
    """
    from gptddp.prepare import prepare as run
    from gptddp.prepare import summary
    from gptddp.progress import Progress
    from gptddp.recipe import Settings

    with Progress(sys.stderr) as progress:
        dataset = run(sources, out, Settings(**options), progress)
    click.echo(summary(dataset))
