"""A text after each evaluation, for who looks at the run. Rank 0 only; it changes no bit of it."""

import time
from itertools import takewhile
from pathlib import Path

from gptddp.config import Config
from gptddp.data.tokenizer import Tokenizer
from gptddp.model.generate import generate, text_of
from gptddp.model.gpt import GPT
from gptddp.run.directory import SAMPLES
from gptddp.run.lines import Lines

MOST_S = 10.0  # for one text: the other ranks wait for it, and not for ever
_TEMPERATURE, _TOP_K = 0.8, 50


class Samples:
    """The file of the texts: the beginnings of documents, always with the same random numbers."""

    def __init__(self, config: Config, generation: int) -> None:
        self._config, self._generation = config, generation
        self._lines = Lines(Path(config.run_dir) / SAMPLES)

    def write(self, step: int, net: GPT, tokenizer: Tokenizer) -> None:
        """One more text, of the model as it is; a disk that takes nothing is not waited for."""
        end, c = time.monotonic() + MOST_S, self._config
        was_training = net.training
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
        self._lines.append({"step": step, "generation": self._generation, "text": text})
