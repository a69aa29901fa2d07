"""Attention and positions within a document (`mask=document`), against the document alone."""

import numpy as np
import pytest
import torch
from support.loaders import Bytes

from gptddp.config import Config, with_preset
from gptddp.data.packing import IDS, documents_of, pack
from gptddp.model.gpt import build
from gptddp.model.micro_batches import micro_batches

CPU, T = torch.device("cpu"), 48
MASKED = with_preset(
    Config(n_layer=2, n_head=2, n_embd=32, seq_len=T, precision="fp32", mask="document"),
    accelerator=False,
)


def packed(how: str):
    """Rows with a few documents, some of them cut; the last row has padding."""
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 250, n).astype(np.uint16) for n in (20, 130, 7, 1, 33, 60, 12)]
    return pack(documents, Bytes.bos, T, np.uint16, how)


def logits_of(net, rows, config=MASKED) -> np.ndarray:
    parts = micro_batches(rows.tokens, rows.valid, Bytes.bos, config, CPU)
    with torch.no_grad():
        return torch.cat([net(x, positions=places) for x, _, places in parts]).numpy()


@pytest.mark.parametrize("how", IDS)
def test_a_document_in_a_row_has_the_logits_of_the_document_alone(how):
    """The logits agree in fp32 at every position, for every piece of every row."""
    net, rows = build(MASKED, 257, CPU).eval(), packed(how)
    logits = logits_of(net, rows)
    segments, _ = documents_of(rows.tokens, rows.valid, Bytes.bos)
    compared = 0
    for i, row in enumerate(rows.tokens[:, :-1].astype(np.int64)):
        for segment in range(segments[i].max() + 1):
            mine = segments[i] == segment
            with torch.no_grad():
                alone = net(torch.from_numpy(row[mine])[None])[0].numpy()
            np.testing.assert_allclose(logits[i, mine], alone, rtol=1e-4, atol=1e-5)
            compared += 1
    assert compared > len(rows)  # rows of several documents are among them
