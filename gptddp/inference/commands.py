"""The commands of a trained model, sample and eval; they import late, as `gptddp/cli.py`."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import click

from gptddp.errors import visible


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--prompt",
    default="",
    metavar="TEXT",
    help="Text to go on from; a space at its end is a token that text rarely has there.",
)
@click.option(
    "--tokens",
    type=click.IntRange(0),
    default=200,
    show_default=True,
    metavar="N",
    help="Tokens to make.",
)
@click.option(
    "--temperature", default=0.8, show_default=True, metavar="F", help="0: the likeliest token."
)
@click.option(
    "--top-k", default=50, show_default=True, metavar="N", help="Likeliest tokens; 0: all."
)
@click.option(
    "--top-p",
    default=1.0,
    show_default=True,
    metavar="F",
    help="Of these the likeliest that come to this probability; 1: all.",
)
@click.option(
    "--seed",
    type=click.IntRange(-(2**63), 2**64 - 1),  # as torch has it
    default=0,
    show_default=True,
    metavar="N",
    help="Another seed, other text.",
)
@click.option("--data", metavar="DIR", help="Dataset with the tokenizer. [default: the run's]")
def sample(run: Path, data: str | None, prompt: str, **options: Any) -> None:
    """Print text from the newest valid checkpoint of RUN, each token as soon as it is there.

    \b
    gptddp sample runs/first --prompt "def" --tokens 100
    gptddp sample runs/first --temperature 1 --top-k 0 --top-p 0.9
    """
    from gptddp.inference.load import load
    from gptddp.inference.options import check
    from gptddp.model.generate import generate, text_of

    check(prompt, options["temperature"], options["top_k"], options["top_p"])
    net, tokenizer, step = load(run, data)
    click.echo(f"step {step}, seed {options['seed']}", err=True)
    try:
        for piece in chain(
            [prompt], text_of(tokenizer, generate(net, tokenizer, prompt, **options))
        ):
            click.echo(piece, nl=False)  # and flush
        click.echo()
    except KeyboardInterrupt:  # enough of it: no word about that
        click.get_current_context().exit(130)


@click.command("eval")
@click.argument("model", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("dataset", metavar="DATASET")
@click.option("--step", type=int, metavar="N", help="Its checkpoint. [default: the newest valid]")
@click.option(
    "--split", type=click.Choice(["val", "train"]), default="val", show_default=True, help="Which."
)
@click.option(
    "--tokens", type=click.IntRange(1), metavar="N", help="About so many. [default: all of it]"
)
@click.option("-o", "--output", type=click.Choice(["json"]), help="Format. [default: a line]")
def evaluate(
    model: Path, dataset: str, step: int | None, split: Any, tokens: int | None, output: str | None
) -> None:
    """Print the loss of RUN on DATASET: nats a token, and bits a byte.

    RUN is a run directory, or a folder with a model of Hugging Face's. DATASET is any that was
    prepared with its tokenizer. The same command gives the same bits.

    \b
    gptddp eval runs/first data
    torchrun --nproc-per-node 2 --no-python gptddp eval runs/first data -o json
    """
    from gptddp.inference.evaluation import evaluate_model

    if report := evaluate_model(model, dataset, split, step, tokens):
        click.echo(json.dumps(report.to_json()) if output else visible(report))
