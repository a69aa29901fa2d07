"""The command that makes datasets; it imports late, like `gptddp/cli.py`."""

import math
import sys
from pathlib import Path
from typing import Any

import click

from gptddp.click_types import HELP
from gptddp.units import size


@click.command(context_settings=HELP)
@click.argument("sources", metavar="SOURCE...", nargs=-1, required=True)
@click.option("--out", metavar="DIR", required=True, help="Folder to make the dataset in.")
@click.option(
    "--text-field",
    default="text",
    show_default=True,
    metavar="NAME",
    help="JSON field or parquet column with the text; doc.text: field text of doc.",
)
@click.option(
    "--tokens-field",
    metavar="NAME",
    help="Parquet column with lists of token ids, to be read instead of text.",
)
@click.option(
    "--tokenizer",
    default="bpe",
    show_default=True,
    metavar="bpe|bytes|FILE",
    help="Train a byte-level BPE, use plain bytes, or take a tokenizer.json.",
)
@click.option(
    "--vocab-size",
    type=int,
    metavar="N",
    help="Vocabulary to train. [default: 2048 below 16 MiB of text, 32768 from 1 GiB, else 4096]",
)
@click.option(
    "--val-fraction",
    type=float,
    default=0.01,
    show_default=True,
    metavar="F",
    help="Fraction of the documents for validation; at least one document.",
)
@click.option(
    "--val",
    multiple=True,
    metavar="SOURCE",
    help="Validation file or folder, instead of a fraction of all. May be repeated.",
)
@click.option(
    "--seed",
    type=int,
    default=1337,
    show_default=True,
    metavar="N",
    help="Seed of the global shuffle.",
)
@click.option(
    "--include",
    multiple=True,
    metavar="GLOB",
    help="Read only these files of a folder, as in '*.py'. May be repeated.",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="GLOB",
    help="Skip these files and subfolders of a folder. May be repeated.",
)
@click.option(
    "--max-bad",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help="Skip up to N unusable records, and list them in bad.jsonl.",
)
def prepare(sources: tuple[str, ...], out: str, val: tuple[str, ...], **options: Any) -> None:
    """Turn text into a dataset: parquet shards and a tokenizer.

    SOURCE is a text file, a .jsonl or .json file (also .gz, .zst, .bz2), a .parquet file, or a
    folder of them. Any other file of a folder is read as text, or skipped if it is not UTF-8;
    hidden files, READMEs and licenses are skipped. Files named train and validation become these
    splits; test files are then skipped. Empty documents and exact copies are dropped.

    If it is killed, the same command continues.

    \b
    gptddp prepare books/ more.jsonl.zst --out data
    gptddp prepare src/ --include '*.py' --vocab-size 4096 --out data
    """
    from gptddp.prepare.build import prepare as run
    from gptddp.prepare.phases import Phases
    from gptddp.prepare.recipe import Settings

    dataset = run(sources, out, Settings(**options), Phases(sys.stderr), val)
    click.echo(summary(dataset.dir, dataset.manifest))


def summary(out: Path, m: dict[str, Any]) -> str:
    """The printed summary of a preparation: sources, skipped and dropped items, the dataset."""
    from gptddp.prepare.reading import BAD

    train, val, lost = m["splits"]["train"], m["splits"]["val"], m["dropped"]
    read = [f"{kind} {n:,} files, {d:,} documents" for kind, (n, d) in m["read"].items()]
    left_out = [f"{number:,} {reason}" for reason, number in m["left_out"].items()]
    cut = m.get("cut", {"documents": 0, "parts": 0})
    bytes_a_token = val["text_bytes"] / val["tokens"]
    nats = val["unigram_entropy_nats"]
    bits_a_byte = nats / math.log(2) / bytes_a_token
    lines = {
        "read": "; ".join(read),
        "skipped": "; ".join(left_out),
        "bad": f"{m['bad_records']:,} records, see {BAD}" if m["bad_records"] else "",
        "documents": f"{train['documents']:,} train, {val['documents']:,} validation",
        "cut": f"{cut['documents']:,} huge documents, into {cut['parts']:,} parts"
        if cut["parts"]
        else "",
        "dropped": f"{lost['empty']:,} empty, {lost['duplicate']:,} copies, "
        f"{lost['binary_files']:,} binary",
        "text": f"{size(train['text_bytes'])} train, {size(val['text_bytes'])} validation",
        "tokenizer": f"{m['tokenizer']['kind']}, vocabulary {m['tokenizer']['vocab_size']:,}, "
        f"{bytes_a_token:.2f} bytes a token",
        "baseline": f"{nats:.3f} nats a token, {bits_a_byte:.3f} bits a byte (token frequencies "
        "only)",
        "dataset": str(out),
        "next": f"gptddp train --data {out} --run-dir RUN",
    }
    return "\n".join(f"{name:12}{text}" for name, text in lines.items() if text)
