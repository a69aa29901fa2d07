"""Runs to audit, audits of them, and lines of their logs that are changed."""

import json
from pathlib import Path

from click.testing import CliRunner
from support.toy import SMALL, training_here

from gptddp import train
from gptddp.cli import cli

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
