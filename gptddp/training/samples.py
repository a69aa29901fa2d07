"""A sample text after each evaluation, for people. Rank 0 only; it changes no bit of the run."""

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

MOST_S = 10.0  # for one text: the other ranks wait for it
_TEMPERATURE, _TOP_K = 0.6, 50  # at 0.8 a small or new model is hard to read


def sample(net: GPT, tokenizer: Tokenizer, c: Config) -> str:
    """Generate the beginning of a document, always with the same random numbers."""
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
    """Write the texts; never wait for a failing disk."""
    lines = Lines(run / SAMPLES)

    def write(event: Event) -> None:
        if event["event"] == "sample":
            lines.append({name: event[name] for name in ("step", "generation", "text")})

    return write
