"""Attention and positions within a document (`mask=document`), against the document alone."""

import dataclasses

import numpy as np
import pytest
import torch
from support.loaders import Bytes
from support.toy import SMALL

from gptddp import train
from gptddp.config import Config, with_preset
from gptddp.data.packing import IDS, documents_of, pack
from gptddp.model.gpt import build
from gptddp.model.micro_batches import micro_batches
from gptddp.run.history import history

CPU, T = torch.device("cpu"), 48
MASKED = with_preset(
    Config(n_layer=2, n_head=2, n_embd=32, seq_len=T, precision="fp32", mask="document"),
    accelerator=False,
)


def packed(how: str):
    """Rows of a few documents, some cut, the last row with padding."""
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 250, n).astype(np.uint16) for n in (20, 130, 7, 1, 33, 60, 12)]
    return pack(documents, Bytes.bos, T, np.uint16, how)


def logits_of(net, rows, config=MASKED) -> np.ndarray:
    parts = micro_batches(rows.tokens, rows.valid, Bytes.bos, config, CPU)
    with torch.no_grad():
        return torch.cat([net(x, positions=places) for x, _, places in parts]).numpy()


@pytest.mark.parametrize("how", IDS)
def test_a_document_in_a_row_has_the_logits_of_the_document_alone(how):
    """In fp32, position for position, for every piece of every row."""
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


def test_without_the_mask_documents_of_a_row_do_see_each_other():
    """The default is plain causal attention with positions that count through the row."""
    plain = dataclasses.replace(MASKED, mask="none")
    net, rows = build(plain, 257, CPU).eval(), packed("best-fit")
    assert all(p is None for _, _, p in micro_batches(rows.tokens, rows.valid, 256, plain, CPU))
    later = documents_of(rows.tokens, rows.valid, Bytes.bos)[0] > 0
    assert np.abs(logits_of(net, rows) - logits_of(net, rows, plain))[later].max() > 1e-3


def test_a_masked_run_learns_and_is_continued_with_its_own_packing_only(
    corpus, tmp_path, train_here, capfd
):
    """pack and mask belong to the run: left out they are kept, others are refused by name."""
    flags = [*SMALL, "--data", str(corpus), "--run-dir", str(tmp_path / "run"), "--lr", "1e-2"]
    own = ["--pack", "concat", "--mask", "document"]
    assert train.main([*flags, *own, "--steps", "20"]) == 0
    assert train.main([*flags, "--steps", "21"]) == 0
    losses = [line["loss"] for line in history(tmp_path / "run")]
    assert len(losses) == 21 and losses[-1] < losses[0] - 0.3
    capfd.readouterr()
    assert train.main([*flags, "--pack", "best-fit", "--mask", "none", "--steps", "22"]) == 2
    said = capfd.readouterr().err
    assert "pack: concat -> best-fit; mask: document -> none" in said and "--pack" in said
