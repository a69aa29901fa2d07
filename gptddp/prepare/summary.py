"""What `gptddp prepare` has made, in a few lines for people, and what to type next."""

import math

from gptddp.data.dataset import Dataset
from gptddp.prepare.reading import BAD


def prepared(dataset: Dataset) -> str:
    """The summary: what was read, left out and dropped, and what the dataset holds."""
    m = dataset.manifest
    train, val, lost = m["splits"]["train"], m["splits"]["val"], m["dropped"]
    read = [f"{kind} {n:,} files, {d:,} documents" for kind, (n, d) in m["read"].items()]
    left_out = [f"{number:,} {reason}" for reason, number in m["left_out"].items()]
    cut = m.get("cut", {"documents": 0, "parts": 0})
    bytes_a_token = val["text_bytes"] / val["tokens"]
    nats = val["unigram_entropy_nats"]
    bits_a_byte = nats / math.log(2) / bytes_a_token
    lines = {
        "read": "; ".join(read),
        "left out": "; ".join(left_out),
        "bad": f"{m['bad_records']:,} records, see {BAD}" if m["bad_records"] else "",
        "documents": f"{train['documents']:,} train, {val['documents']:,} validation",
        "cut": f"{cut['documents']:,} huge documents, into {cut['parts']:,} parts"
        if cut["parts"]
        else "",
        "dropped": f"{lost['empty']:,} empty, {lost['duplicate']:,} copies, "
        f"{lost['binary_files']:,} binary",
        "text": f"{train['text_bytes'] / 1e6:,.1f} MB train, {val['text_bytes'] / 1e6:,.1f} MB "
        "validation",
        "tokenizer": f"{m['tokenizer']['kind']}, vocabulary {m['tokenizer']['vocab_size']:,}, "
        f"{bytes_a_token:.2f} bytes a token",
        "baseline": f"{nats:.3f} nats a token, {bits_a_byte:.3f} bits a byte (token frequencies "
        "only)",
        "dataset": dataset.dir,
        "next": f"gptddp train --data {dataset.dir} --run-dir RUN",
    }
    return "\n".join(f"{name:12}{text}" for name, text in lines.items() if text)
