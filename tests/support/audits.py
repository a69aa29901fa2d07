"""Runs to audit, what is changed in them, and the command."""

import json
import shutil
from pathlib import Path

from click.testing import CliRunner
from support.toy import SMALL, training_here

from gptddp import train
from gptddp.checkpoint import store
from gptddp.checkpoint.load import load_newest
from gptddp.checkpoint.writer import Writer
from gptddp.cli import cli
from gptddp.run.directory import LEDGER

FLAGS = ["--steps", "8", "--eval-every", "3", "--checkpoint-every", "0", "--keep", "9"]


def trained(corpus: Path, folder: Path, *flags: str) -> Path:
    with training_here():
        assert (
            train.main([*SMALL, *FLAGS, "--data", str(corpus), "--run-dir", str(folder), *flags])
            == 0
        )
    return folder


def audit(run, *flags):
    result = CliRunner().invoke(cli, ["audit", str(run), *flags])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output


def lines_of(run):
    logs = sorted(run.glob("log.*.jsonl"))
    return [(log, [json.loads(line) for line in log.read_text().splitlines()]) for log in logs]


def edit(run, step, **changes):
    """Change fields of a line of the log; a function gets the old value."""
    for log, lines in lines_of(run):
        for line in (it for it in lines if it["step"] == step):
            line |= {k: v(line[k]) if callable(v) else v for k, v in changes.items()}
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))


def save_again(run, parent=None, **changes):
    """The newest checkpoint with another `meta`, all hashes made anew; None takes a field out.

    `parent`: the checkpoint that it says to follow.
    """
    loaded = load_newest(run)
    meta = {key: v for key, v in (loaded.meta | changes).items() if v is not None}
    path = run / "checkpoints" / loaded.name
    manifest = store.unsealed(path)
    how = {name: manifest[name] for name in ("run_id", "config")}
    shutil.rmtree(path)
    writer = Writer(run, loaded.generation, keep=9, parent=parent, **how)
    assert writer.save(loaded.step, loaded.tensors, meta).error is None


def edit_ledger(run, event, number=0, **changes):
    """Change fields of an event; without any it is taken out."""
    lines = [json.loads(line) for line in (run / LEDGER).read_text().splitlines()]
    it = [line for line in lines if line["event"] == event][number]
    it |= changes
    if not changes:
        lines.remove(it)
    (run / LEDGER).write_text("".join(json.dumps(line) + "\n" for line in lines))
