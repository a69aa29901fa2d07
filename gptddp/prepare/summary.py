"""What a command has made, in a few lines for people, and what to type next."""

import math
from typing import Any

from gptddp.data.dataset import Dataset
from gptddp.prepare.bad_records import LIST


def prepared(dataset: Dataset) -> str:
    """The summary of `gptddp prepare`."""
    m = dataset.manifest
    train, val, lost = m["splits"]["train"], m["splits"]["val"], m["dropped"]
    bytes_a_token = val["text_bytes"] / val["tokens"]
    bits_a_byte = val["unigram_entropy_nats"] / math.log(2) / bytes_a_token
    return f"""\
{_sources(m)}\
documents   {train["documents"]:,} train, {val["documents"]:,} validation
{_cut(m)}\
dropped     {lost["empty"]:,} empty, {lost["duplicate"]:,} copies, {lost["binary_files"]:,} binary
text        {train["text_bytes"] / 1e6:,.1f} MB train, {val["text_bytes"] / 1e6:,.1f} MB validation
tokenizer   {m["tokenizer"]["kind"]}, vocabulary {m["tokenizer"]["vocab_size"]:,}, \
{bytes_a_token:.2f} bytes a token
entropy     {val["unigram_entropy_nats"]:.3f} nats a token, {bits_a_byte:.3f} bits a byte: \
the loss of a model that knows only how frequent tokens are
{_next(dataset)}"""


def _sources(manifest: dict[str, Any]) -> str:
    """What was read and left out; nothing where an older version has made the dataset."""
    if "read" not in manifest:
        return ""
    read = [f"{kind} {n:,} files, {d:,} documents" for kind, (n, d) in manifest["read"].items()]
    lines = [f"read        {'; '.join(read)}\n"]
    if manifest["left_out"]:
        left = [f"{number:,} {reason}" for reason, number in manifest["left_out"].items()]
        lines.append(f"left out    {'; '.join(left)}\n")
    if manifest["bad_records"]:
        lines.append(f"bad         {manifest['bad_records']:,} records, see {LIST}\n")
    return "".join(lines)


def _cut(manifest: dict[str, Any]) -> str:
    """Which of the documents are in parts; nothing where none is."""
    if "cut" not in manifest:
        return ""
    cut = manifest["cut"]
    return f"cut         {cut['documents']:,} huge documents, into {cut['parts']:,} parts\n"


def _next(dataset: Dataset) -> str:
    return f"""\
dataset     {dataset.dir}
next        gptddp train --data {dataset.dir} --run-dir RUN"""
