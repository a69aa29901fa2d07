"""Generates text with a model, token by token."""

import codecs
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from gptddp.data.tokenizer import Tokenizer
from gptddp.model.attention import LayerCache
from gptddp.model.gpt import GPT


@torch.no_grad()
def generate(
    net: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_k: int,
    top_p: float = 1.0,
    seed: int,
) -> Iterator[int]:
    """Yield up to `tokens` token ids after the prompt; stops at the end of the document.

    Temperature 0 takes the likeliest token. Beyond seq_len the oldest tokens are dropped: all
    positions shift, so all tokens are recomputed for each new token.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = [tokenizer.bos, *tokenizer.encoder()(prompt).tolist()]
    cache = [LayerCache(net.seq_len) for _ in net.blocks]
    device = next(net.parameters()).device
    for _ in range(tokens):
        if len(ids) > net.seq_len:
            h = net.hidden(torch.tensor([ids[-net.seq_len :]], device=device))
        else:
            h = net.hidden(torch.tensor([ids[cache[0].length :]], device=device), cache=cache)
        logits = net.logits(h[0, -1])[: tokenizer.vocab_size].float().cpu()
        ids.append(_choose(logits, temperature, top_k, top_p, generator))
        if ids[-1] == tokenizer.bos:
            return
        yield ids[-1]


def _choose(
    logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator
) -> int:
    """Draw the next token by logits (vocab), from the nucleus of the `top_k` likeliest tokens.

    Nucleus sampling (Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration"): the
    smallest set of likeliest tokens with a total probability of at least `top_p`, never empty.
    """
    if temperature == 0:
        return int(logits.argmax())
    best, index = logits.topk(min(top_k or len(logits), len(logits)))  # likeliest first
    scaled = best / temperature
    if not scaled.isfinite().all():  # the temperature is almost 0
        return int(index[0])
    chances = F.softmax(scaled, dim=-1)
    if top_p < 1:
        kept = chances.cumsum(-1) - chances < top_p
        kept[0] = True  # also if top_p is 0 in fp32
        chances = chances.where(kept, 0)  # multinomial normalises them
    return int(index[torch.multinomial(chances, 1, generator=generator)])


def text_of(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Yield the text of the ids piece by piece; joined, the pieces are the `decode` of all ids.

    A character whose bytes are in several tokens is in the piece of the last of these tokens.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for i in ids:
        yield decoder.decode(tokenizer.to_bytes([i]))
    yield decoder.decode(b"", final=True)
