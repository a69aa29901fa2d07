"""Runs to audit, changes to them, and the command."""

import json
import shutil
from pathlib import Path

from click.testing import CliRunner
from support import toy
from support.waiting_writer import Writer

from gptddp.checkpoint import store
from gptddp.checkpoint.load import load_newest
from gptddp.cli import cli
from gptddp.run.directory import LEDGER

FLAGS = [
    *("--steps", "8", "--eval-every", "3", "--checkpoint-every", "0", "--keep", "9"),
    *("--n-layer", "1", "--lanes", "2", "--batch", "2", "--micro-batch", "1"),
]


def trained(corpus: Path, folder: Path, *flags: str) -> Path:
    return toy.trained(corpus, folder, *FLAGS, *flags)


def audit(run, *flags):
    """The exit code and the output of the command."""
    result = CliRunner().invoke(cli, ["audit", str(run), *flags])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result.exit_code, result.output


def lines_of(run):
    logs = sorted(run.glob("log.*.jsonl"))
    return [(log, [json.loads(line) for line in log.read_text().splitlines()]) for log in logs]


def change_lines(run, change):
    """Replace each line of the log by the result of `change`; None removes it."""
    for log, lines in lines_of(run):
        kept = [it for it in map(change, lines) if it is not None]
        log.write_text("".join(json.dumps(it) + "\n" for it in kept))


def edit(run, step, **changes):
    """Change fields of a line of the log; a function gets the old value."""

    def edited(line):
        if line["step"] == step:
            line |= {k: v(line[k]) if callable(v) else v for k, v in changes.items()}
        return line

    change_lines(run, edited)


def edit_events(run, *kinds, which=slice(None), **changes):
    """Change fields of events of these kinds; without `changes` the events are removed."""
    events = [json.loads(line) for line in (run / LEDGER).read_text().splitlines()]
    for event in [it for it in events if it["event"] in kinds][which]:
        event.update(changes)
        if not changes:
            events.remove(event)
    (run / LEDGER).write_text("".join(json.dumps(it) + "\n" for it in events))


def edit_json(run, name, **changes):
    """Change fields of a file, or of the configuration in it."""
    content = json.loads((run / name).read_text())
    for key, value in changes.items():
        within = content["config"] if key in content.get("config", {}) else content
        within[key] = value
    (run / name).write_text(json.dumps(content))


def save_again(run, parent=None, **changes):
    """Save the newest checkpoint again with changed `meta` and new hashes; None removes a field.

    `parent`: the checkpoint that it follows by its manifest.
    """
    loaded = load_newest(run)
    meta = {key: v for key, v in (loaded.meta | changes).items() if v is not None}
    path = run / "checkpoints" / loaded.name
    manifest = store.unsealed(path)
    how = {name: manifest[name] for name in ("run_id", "config")}
    shutil.rmtree(path)
    writer = Writer(run, loaded.generation, keep=9, parent=parent, **how)
    assert writer.save(loaded.step, loaded.tensors, meta).error is None
