"""Text from a run's newest valid checkpoint."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.nn import functional as F

from gptddp.checkpoint.load import copy_into, load_newest
from gptddp.data.dataset import open_dataset
from gptddp.data.tokenizer import Tokenizer
from gptddp.errors import CheckpointError, ConfigError
from gptddp.model.gpt import GPT, build
from gptddp.run.directory import config_of, id_of


def load(run: Path, data: str | None = None) -> tuple[GPT, Tokenizer, int]:
    """The model, its tokenizer and the checkpoint's step, read without changing the run.

    `data` names the dataset directory where it is not the one that the run was trained on. Raises
    GptddpError where there is no run, no valid checkpoint or no such dataset.
    """
    if (config := config_of(run)) is None:
        raise ConfigError(f"{run} is not a run directory: it has no config.json")
    tokenizer = open_dataset(data or config.data, "quarantine").tokenizer()
    loaded = load_newest(run, run_id=id_of(run), set_aside=False)
    if loaded is None:
        raise CheckpointError(f"{run} has no checkpoint yet: the first is written while it trains")
    net = build(config, tokenizer.vocab_size, torch.device("cpu"))
    live = {f"model.{name}": p.detach() for name, p in net.named_parameters()}
    copy_into(live, {k: t for k, t in loaded.tensors.items() if k.startswith("model.")})
    return net.eval(), tokenizer, loaded.step


@torch.no_grad()
def generate(
    net: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[int]:
    """Yield up to `tokens` token ids after the prompt; ends where the document ends.

    Temperature 0 takes the likeliest token. Beyond seq_len the oldest tokens are forgotten.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = [tokenizer.bos, *tokenizer.encoder()(prompt).tolist()]
    for _ in range(tokens):
        last = net.hidden(torch.tensor([ids[-net.seq_len :]]))[0, -1]
        logits = net.logits(last)[: tokenizer.vocab_size].float()
        if temperature > 0:
            best, index = logits.topk(min(top_k or len(logits), len(logits)))
            chances = F.softmax(best / temperature, dim=-1)
            ids.append(int(index[torch.multinomial(chances, 1, generator=generator)]))
        else:
            ids.append(int(logits.argmax()))
        if ids[-1] == tokenizer.bos:
            return
        yield ids[-1]
