"""The command `gptddp sweep`: train runs that differ in some fields, one after the other.

A process trains each run, with the same bits as if the run was started by hand.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gptddp.errors import ConfigError
from gptddp.files import exists, patiently

if TYPE_CHECKING:
    from gptddp.config import Config

# Like `gptddp train`, which shows that it loads torch, but without the seconds of an orderly exit.
_TRAIN = """
from gptddp.distributed.report import load_torch, shown
with shown():
    load_torch()
    from gptddp.distributed.process import run
    from gptddp.train import main
    run(main)
"""
_say = partial(click.echo, err=True)


class _Sweep(click.Command):
    """A command that puts the words after `--` into its context's `obj`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.obj = args[at + 1 :]
        return super().parse_args(ctx, args[:at])


@click.command(cls=_Sweep, context_settings={"ignore_unknown_options": True})
@click.option("--run-dir", metavar="DIR", required=True, type=click.Path(path_type=Path),
              help="Folder of the sweep; it contains the runs, as in DIR/lr-3e-3.")  # fmt: skip
@click.argument("swept", nargs=-1, required=True, type=click.UNPROCESSED,
                metavar="--FIELD A,B... -- [TRAIN OPTIONS]")  # fmt: skip
@click.pass_context
def sweep(ctx: click.Context, run_dir: Path, swept: tuple[str, ...]) -> None:
    """Train one run for each value of a field, and compare them.

    Runs are trained one after the other. Before `--`: fields with their values; several fields give
    every combination. After `--`: options of `gptddp train` for all runs. The same command again
    skips finished runs and continues the others. Exit code 1 if a run failed; the others are still
    trained.

    \b
    gptddp sweep --run-dir runs/lr --lr 1e-3,3e-3,1e-2 -- --data data --steps 300
    """
    from gptddp import flags, grid
    from gptddp.report import side_by_side

    base = flags.from_args(ctx.obj)
    if base.run_dir:
        raise ConfigError("--run-dir is the folder of the sweep: give it once, before --")
    values = flags.texts(swept)
    if len(values) < sum(it.startswith("--") for it in swept):
        raise ConfigError("a field is given twice: give all its values at once, as --lr 1e-3,3e-3")
    configs = grid.configurations(values, base, ctx.obj)
    failed = _train_all(_prepare(run_dir, configs))
    table = side_by_side.side_by_side(list(side_by_side.find(run_dir)))
    click.echo(side_by_side.as_text(table, shutil.get_terminal_size((0, 0)).columns))
    for name, code in failed.items():
        _say(f"{name} failed with exit code {code}; the same command tries it again")
    ctx.exit(1 if failed else 0)


def _prepare(folder: Path, configs: "Mapping[str, Config]") -> "dict[str, Config]":
    """Check all that can be checked early; return the runs with directories below `folder`.

    Raises ConfigError or DataError if any of the runs would be refused, OSError.
    """
    from gptddp.checkpoint import run_state
    from gptddp.config import with_preset
    from gptddp.data.dataset import open_dataset
    from gptddp.flags import continued
    from gptddp.track.trackers import check_installed

    runs = {name: replace(c, run_dir=str(folder / name)) for name, c in configs.items()}
    for config in runs.values():
        check_installed(config.track)
        known = config.preset or config.device or not exists("/dev/nvidiactl")
        if patiently(partial(run_state.read, config.run_dir)).config is not None:
            continued(config, run_state.configuration(config.run_dir))
            run_state.why_finished(config)
        elif known and not config.init_from:
            # Else init_from decides some fields, or only torch knows whether a GPU can be used.
            with_preset(config, accelerator=config.device == "cuda")
    if not config.data:
        raise ConfigError("--data is missing: give it after --, as in `-- --data data`")
    patiently(lambda: open_dataset(config.data, config.on_bad or "quarantine"))
    there = next(it for it in (folder, *folder.absolute().parents) if exists(it))
    if not os.access(there, os.W_OK):
        raise ConfigError(f"{there} is not writable: give another --run-dir")
    return runs


def _train_all(runs: "Mapping[str, Config]") -> dict[str, int]:
    """Train the unfinished runs in order; return the exit codes of failed runs, by name.

    A signal that ends this process also stops the training, which saves its state.
    """
    from ctypes import CDLL

    from gptddp.checkpoint.run_state import why_finished
    from gptddp.distributed.process import PR_SET_PDEATHSIG
    from gptddp.flags import given, to_args

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    this, prctl = os.getpid(), CDLL(None).prctl

    def die_with_this() -> None:
        """In the child: the kernel stops it if this process is killed."""
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != this:  # it was killed before the line above
            os._exit(1)

    failed = {}
    for count, (name, config) in enumerate(runs.items(), 1):
        if why := why_finished(config):
            _say(f"[{count}/{len(runs)}] {name}: {why}")
            continue
        args = to_args(given(config))
        _say(f"[{count}/{len(runs)}] {name}\n$ gptddp train {shlex.join(args)}")
        command = [sys.executable, "-c", _TRAIN, *args]
        # A new session: the terminal's Ctrl-C must reach the child only once, from here.
        child = subprocess.Popen(command, start_new_session=True, preexec_fn=die_with_this)
        try:
            code = child.wait()
        except BaseException:  # the SystemExit of a signal
            child.terminate()  # not SIGINT: it prints a traceback while Python imports
            child.wait()
            _say(f"stopped at {name}: the same command continues")
            raise
        if code:
            failed[name] = code if code > 0 else 128 - code
    return failed
