"""The commands of a trained model, sample and eval; they import late, like `gptddp/cli.py`."""

import json
import math
from itertools import chain
from pathlib import Path
from typing import Any

import click

from gptddp.click_types import HELP, Count
from gptddp.distributed.report import load_torch, shown
from gptddp.errors import ConfigError, visible


@click.command(context_settings=HELP)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--prompt",
    default="",
    metavar="TEXT",
    help="Text to continue; avoid a trailing space.",
)
@click.option(
    "--tokens",
    type=Count(0),
    default=200,
    show_default=True,
    metavar="N",
    help="Number of tokens to generate.",
)
@click.option(
    "--temperature", default=0.8, show_default=True, metavar="F", help="0: the likeliest token."
)
@click.option(
    "--top-k", default=50, show_default=True, metavar="N", help="Draw from the N likeliest; 0: all."
)
@click.option(
    "--top-p",
    default=1.0,
    show_default=True,
    metavar="F",
    help="Keep the likeliest of them, up to this total probability; 1: all.",
)
@click.option(
    "--seed",
    type=Count(-(2**63), 2**64 - 1),  # the range of torch's seeds
    default=0,
    show_default=True,
    metavar="N",
    help="Seed; another one gives another text.",
)
@click.option("--step", type=int, metavar="N", help="Checkpoint step. [default: the newest valid]")
@click.option("--data", metavar="DIR", help="Dataset with the tokenizer. [default: the run's]")
def sample(run: Path, data: str | None, step: int | None, prompt: str, **options: Any) -> None:
    """Print text from a checkpoint of RUN, token by token.

    \b
    gptddp sample runs/first --prompt "def" --tokens 100
    gptddp sample runs/first --temperature 1 --top-k 0 --top-p 0.9
    """
    _check(prompt, options["temperature"], options["top_k"], options["top_p"])
    with shown():
        load_torch()
        from gptddp.inference.load_model import load
        from gptddp.model.generate import generate, text_of

        net, tokenizer, found = load(run, data, step)
    click.echo(f"step {found}, seed {options['seed']}", err=True)
    try:
        for piece in chain(
            [prompt], text_of(tokenizer, generate(net, tokenizer, prompt, **options))
        ):
            click.echo(piece, nl=False)  # and flush
        click.echo()
    except KeyboardInterrupt:  # the user has seen enough: no message
        click.get_current_context().exit(130)


def _check(prompt: str, temperature: float, top_k: int, top_p: float) -> None:
    """Raise ConfigError for the first invalid value, such as NaN."""
    try:
        prompt.encode()
    except UnicodeEncodeError:  # the shell has passed other bytes
        raise ConfigError("--prompt is not UTF-8: give text in UTF-8") from None
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"--temperature is {temperature}: use 0 for the likeliest token, or more")
    if top_k < 0:
        raise ConfigError(f"--top-k is {top_k}: use 0 for all tokens, or more")
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top-p is {top_p}: use more than 0, and at most 1 for all tokens")


@click.command("eval", context_settings=HELP)
@click.argument("model", metavar="RUN", type=click.Path(path_type=Path))
@click.argument("dataset", metavar="DATASET")
@click.option("--step", type=int, metavar="N", help="Checkpoint step. [default: the newest valid]")
@click.option(
    "--split",
    type=click.Choice(["val", "train"]),
    default="val",
    show_default=True,
    help="Split to evaluate.",
)
@click.option(
    "--tokens",
    type=Count(1),
    metavar="N",
    help="Approximate token count. [default: the whole split]",
)
@click.option("-o", "--output", type=click.Choice(["json"]), help="Format. [default: a line]")
def evaluate(
    model: Path, dataset: str, step: int | None, split: Any, tokens: int | None, output: str | None
) -> None:
    """Print the loss of RUN on DATASET: nats per token, bits per byte.

    RUN is a run directory, or a Hugging Face model folder. DATASET is any dataset
    prepared with its tokenizer. A nat is 1.44 bits. The same command gives the same
    bits.

    \b
    gptddp eval runs/first data
    torchrun --nproc-per-node 2 --no-python gptddp eval runs/first data -o json
    """
    with shown():
        load_torch()
        from gptddp.inference.load_model import as_line, evaluate_model

        if report := evaluate_model(model, dataset, split, step, tokens):
            click.echo(json.dumps(report) if output else visible(as_line(report)))
