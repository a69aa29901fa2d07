"""Trains the runs of a sweep on this machine, one after the other, each in a fresh process."""

import contextlib
import ctypes
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType

from gptddp.checkpoint import run_state
from gptddp.config import Config, with_preset
from gptddp.errors import ConfigError
from gptddp.files import exists, explain, make_folder, patiently
from gptddp.flags import check_fixed, flag, from_saved, given, to_args
from gptddp.run.directory import LEDGER, is_run

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>

Say = Callable[[str], None]


def prepare(folder: Path, runs: Mapping[str, Config]) -> dict[str, Config]:
    """The runs with their directories below `folder`, once all that can be checked early is right.

    Raises ConfigError or DataError for what any of them would refuse, OSError.
    """
    placed = {name: replace(c, run_dir=str(folder / name)) for name, c in runs.items()}
    if is_run(folder):
        raise ConfigError(f"{folder} is a run itself: give the runs of a sweep a folder of theirs")
    for config in placed.values():
        _check(config)
    _check_data(next(iter(placed.values())))
    try:
        patiently(lambda: make_folder(folder))
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {explain(error)}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{folder} cannot be written: give another --run-dir")
    return placed


def _check(config: Config) -> None:
    """Raise ConfigError where the run would end at once with it."""
    found = patiently(lambda: run_state.read(config.run_dir))
    if found.config is not None:
        check_fixed(config, from_saved(Path(config.run_dir) / LEDGER, found.config))
        run_state.why_finished(config)
    elif not config.init_from:  # whose folder decides some fields
        # Without these, torch alone knows the preset, and loading it takes seconds.
        if config.preset or config.device or not exists("/dev/nvidiactl"):
            with_preset(config, accelerator=config.device == "cuda")


def _check_data(config: Config) -> None:
    from gptddp.data.dataset import open_dataset

    if not config.data:
        raise ConfigError(f"{flag('data')} is missing: give the dataset after --, as in -- --data D")
    patiently(lambda: open_dataset(config.data, config.on_bad or "quarantine"))


def train_all(runs: Mapping[str, Config], say: Say) -> tuple[dict[str, int], int]:
    """Train what is not finished, in order: exit codes of the runs that failed, by name; and the
    number of the signal that has stopped it, or 0.
    """
    failed: dict[str, int] = {}
    with _Trainer().installed() as trainer:
        for number, (name, config) in enumerate(runs.items(), 1):
            if why := run_state.why_finished(config):
                say(f"[{number}/{len(runs)}] {name}: {why}")
                continue
            args = to_args(given(config))
            say(f"[{number}/{len(runs)}] {name}\n$ gptddp train {shlex.join(args)}")
            code = trainer.run([sys.executable, "-m", "gptddp.train", *args])
            if trainer.stopped:
                return failed, trainer.stopped
            if code:
                failed[name] = code
    return failed, 0


class _Trainer:
    """A training at a time; a signal to stop is passed on to it, and no other begins."""

    def __init__(self) -> None:
        self.stopped = 0  # by which signal
        self._child: subprocess.Popen[bytes] | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator["_Trainer"]:
        """Handle the signals; one that is ignored, as SIGHUP under nohup, stays ignored."""
        heard = [it for it in _STOPS if signal.getsignal(it) != signal.SIG_IGN]
        old = {number: signal.signal(number, self._stop) for number in heard}
        try:
            yield self
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def run(self, command: list[str]) -> int:
        """Its exit code, 128 + the number of the signal that it died of; 0 where it was stopped.

        It has a session of its own, so that a terminal's Ctrl-C reaches it once: from here.
        """
        if self.stopped:
            return 0
        with subprocess.Popen(command, start_new_session=True, preexec_fn=_end_with_parent) as child:
            self._child = child
            if self.stopped:  # a moment ago
                child.terminate()
            code = child.wait()
        return code if code >= 0 else 128 - code

    def _stop(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM for all: unlike SIGINT it has no traceback where Python is still importing."""
        self.stopped = self.stopped or number
        if self._child is not None:
            self._child.terminate()


def _end_with_parent() -> None:
    """Have the kernel stop this process when the sweep is killed: it saves, and nobody else is."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
