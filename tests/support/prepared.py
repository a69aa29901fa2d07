"""Runs `gptddp prepare`, reads the texts of a dataset, and flips a bit in one."""

import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
from click.testing import CliRunner, Result
from support.paths import ROOT

from gptddp.cli import cli
from gptddp.data.dataset import Dataset, Split
from gptddp.prepare.recipe import Settings

BYTES = Settings(tokenizer="bytes")
CJK = "".join(chr(0x4E00 + n * 7919 % 20_000) for n in range(70_000))


def run(*args: object) -> Result:
    return CliRunner().invoke(cli, ["prepare", *map(str, args)])


def refused(result: Result, *words: str) -> None:
    """The command ended with one message, exit code 2 and no traceback."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == "" and ("\n" + result.stderr).count("\nError: ") == 1
    for word in words:
        assert word in result.stderr


def texts(dataset: Dataset, split: Split) -> list[str]:
    return [text for group in dataset.row_groups(split) for text in dataset.read(group)]


def all_texts(dataset: Dataset) -> list[str]:
    return sorted(texts(dataset, "train") + texts(dataset, "val"))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, hidden ones too."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


KILL = """
import os, pydoc, signal
owner = pydoc.locate({owner!r})
real, calls = owner.{name}, 0
def killing(*args, **kwargs):
    global calls
    calls += 1
    if calls == {calls}:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **kwargs)
owner.{name} = killing
"""


def killing(moment: str, calls: int) -> str:
    """Code that makes a process kill itself at this call of the function `moment`."""
    owner, name = moment.rsplit(".", 1)
    return KILL.format(owner=owner, name=name, calls=calls)


def child(code: str, **options: object) -> subprocess.CompletedProcess[str]:
    """Run code in a process of its own, with everything that these tests import."""
    modules = ("data.dataset", "prepare.build", "prepare.output", "prepare.recipe")
    head = "".join(f"from gptddp.{module} import *\n" for module in modules)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", head + code]
    return subprocess.run(command, env=env, capture_output=True, text=True, **options)  # type: ignore[call-overload, no-any-return]


def flip(dataset: Dataset, number: int) -> str:
    """Flip a bit in the text of a training row group; return its name in messages."""
    group = dataset.row_groups("train")[number]
    path = dataset.dir / group.path
    column = pq.read_metadata(path).row_group(group.index).column(0)
    content = bytearray(path.read_bytes())
    content[column.data_page_offset + column.total_compressed_size // 2] ^= 1
    path.write_bytes(content)
    return f"{path}, row group {group.index}"
