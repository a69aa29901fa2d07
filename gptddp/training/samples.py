"""A text after each evaluation, to be read by people. Rank 0 only; it changes no bit of the run."""

import time
from itertools import takewhile
from pathlib import Path

from gptddp.config import Config
from gptddp.data.tokenizer import Tokenizer
from gptddp.model.generate import generate, text_of
from gptddp.model.gpt import GPT
from gptddp.run.directory import SAMPLES
from gptddp.run.lines import Lines
from gptddp.training.events import Event, Sink

MOST_S = 10.0  # for one text: the other ranks wait for it, and not for ever
_TEMPERATURE, _TOP_K = 0.6, 50  # of a model that is small or new, 0.8 is hard to read


def sample(net: GPT, tokenizer: Tokenizer, c: Config) -> str:
    """The beginning of a document, by the model as it is, always with the same random numbers."""
    end, was_training = time.monotonic() + MOST_S, net.training
    net.eval()
    ids = generate(
        net,
        tokenizer,
        "",
        tokens=c.sample_tokens,
        temperature=_TEMPERATURE,
        top_k=_TOP_K,
        seed=c.seed,
    )
    text = "".join(text_of(tokenizer, takewhile(lambda _: time.monotonic() < end, ids)))
    net.train(was_training)
    return text


def to_samples(run: Path) -> Sink:
    """Writes the texts; a disk that takes nothing is not waited for."""
    lines = Lines(run / SAMPLES)

    def write(event: Event) -> None:
        if event["event"] == "sample":
            lines.append({name: event[name] for name in ("step", "generation", "text")})

    return write
