"""Snapshots that a launcher saves as checkpoints, because no life of the run does.

A stop is agreed by all ranks and ends with a checkpoint. But a job that is stopped while its world
forms again has no ranks, and its snapshots go with the pods: then each launcher saves its own
(`rescue`). So it does after a final error, as of a life that was refused at its start. And where
lives are shorter than a save, none would ever be committed: then one launcher saves the snapshot
that a life goes on from while that life trains (`LateSaves`).
"""

import logging
import multiprocessing
import signal
import sys
import time
from contextlib import closing, suppress
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from gptddp.checkpoint import late, run_state, snapshot, store
from gptddp.checkpoint.saved_state import SavedState
from gptddp.checkpoint.writer import Writer
from gptddp.config import Config, with_preset
from gptddp.distributed import pulse
from gptddp.distributed.process import die_with_launcher, exit_now
from gptddp.distributed.replicas import state_fp
from gptddp.distributed.report import say
from gptddp.errors import Superseded
from gptddp.files import exists, patiently
from gptddp.run.directory import CHECKPOINTS
from gptddp.run.history import Ledger, RunLog, complete, newest_life, recover, why_left
from gptddp.run.lease import is_theirs
from gptddp.run.recovery import UNKNOWN

log = logging.getLogger(__name__)

STOP_S = 1.0  # for a late save to take its files away


def rescue(config: Config, memory: Path, over: bool = False) -> str | None:
    """Commit the snapshot in the folder `memory`, if it is the run's newest state; its new name.

    Any pod may do so, and all at once: the first makes the checkpoint. A snapshot that a later life
    has gone on from is not committed, unless that was the last (`over`), nor one of ranks that
    differed. Raises OSError, and Superseded where the run is another job's, or goes on without this
    pod.
    """
    found = _newer_than_any_checkpoint(config, memory)
    if found is None:
        return None
    if not over and found.generation < patiently(lambda: newest_life(Path(config.run_dir))):
        return None
    return _commit(config, found, read_back=over)


def _newer_than_any_checkpoint(config: Config, memory: Path) -> SavedState | None:
    """The snapshot of the run, if a checkpoint of it would be the newest and on no branch left."""
    run = Path(config.run_dir)
    found = snapshot.usable(snapshot.path_of(memory, run))
    if found is None:
        return None
    if found.run_id != patiently(lambda: run_state.read(run)).run_id or patiently(
        partial(_why_not, run, found)
    ):
        return None
    return found


def _why_not(run: Path, found: SavedState) -> str | None:
    """Why the state of a life that is over is of no more use; None where it is. Raises OSError."""
    newest = store.newest(run, found.run_id)
    if store.order(newest) >= (found.generation, found.step):
        return f"{newest} is as new, or newer"
    if why := why_left(run, found.generation, found.step):
        return f"the run has not gone on from this state: {why}"
    return None


def _closed(config: Config) -> Config:
    """As the run has it, every field closed."""
    return with_preset(patiently(lambda: run_state.in_force(config)), accelerator=False)


def _commit(config: Config, found: SavedState, read_back: bool, logged: bool = False) -> str | None:
    """Save it, with its steps in the log before and an event in the ledger after; its name.

    `logged`: they are there already, and the log is that of a life that may train on.
    """
    run, closed = Path(config.run_dir), _closed(config)
    patiently(lambda: _check_lease(run))
    with closing(Ledger(run)) as ledger, closing(RunLog(run, found.generation, ledger)) as lines:
        patiently(lambda: recover(run, ledger, found.events))
        if not logged:
            patiently(lambda: complete(run, lines, found.lines, found.step))
        writer = Writer(
            run,
            found.generation,
            run_id=found.run_id,
            config=patiently(lambda: _config_of(run, found)),
            parent=patiently(lambda: store.newest(run, found.run_id)),
            keep=closed.keep,
            keep_every=closed.keep_every,
            before_commit=lines.sync,  # and the ledger before it
            fence=lambda: _check(run, found),
        )
        # in this process nothing else beats; see Note in late.py
        writer.read_back, writer.wrote = read_back, pulse.beat
        meta = _with_fingerprint(found)
        saved = writer.save_bytes(found.step, found.layout, found.data, meta)
        if saved.error is None:
            last = next((it for it in found.lines if it["step"] == found.step), {})
            prints = {name: meta[name] for name in ("chain_fp", "state_fp")}
            prints["batch_fp"] = last.get("batch_fp")
            ledger.event("checkpoint", found.generation, **saved.committed(), **prints)
            ledger.settle(STOP_S)
    path = run / CHECKPOINTS / saved.name
    by_another_pod = exists(path) and not store.is_foreign(path, found.run_id, unknown=True)
    if saved.error and not by_another_pod:
        log.warning("the state of step %d is not saved: %s", found.step, saved.error)
        return None
    return saved.name


def _config_of(run: Path, found: SavedState) -> dict[str, Any] | None:
    """What the run has now; the start of a life on a full disk is in its snapshot alone."""
    ledger = run_state.read(run)
    for event in found.events:
        with suppress(LookupError, TypeError, ValueError):  # a foreign one
            ledger.add(event)
    return ledger.config


def _with_fingerprint(found: SavedState) -> dict[str, Any]:
    """Its meta. A fault comes between two comparisons of the ranks: then no worker has made it."""
    if "state_fp" in found.meta:
        return found.meta
    return found.meta | {"state_fp": f"{state_fp(found.tensors):016x}"}


def _check(run: Path, found: SavedState) -> None:
    """Raise Superseded where it is not to be committed any more."""
    _check_lease(run)
    if why := _why_not(run, found):
        raise Superseded(why)


def _check_lease(run: Path) -> None:
    if not is_theirs(run, []):
        raise Superseded(f"a life that this pod was not in has run {run}, or had it last")


# -- while the next life trains --------------------------------------------------------------------


class LateSaves:
    """The launcher's end: starts a late save when a worker asks for it; one at a time.

    `folder`: the pod's own, see checkpoint/late.py. Nothing here waits for the run directory.
    """

    def __init__(self, config: Config, memory: Path, folder: Path) -> None:
        self._args = (config, memory, folder)
        self._process: BaseProcess | None = None
        self._hung = False  # the last one, or one before that none has ended well after

    def poll(self) -> None:
        """Start what has been asked for since the last call."""
        if self._process is not None and not self._process.is_alive():
            self._hung &= self._process.exitcode != 0
            self._process.close()
            self._process = None
        folder = self._args[2]
        with suppress(OSError, EOFError):  # the next life asks again
            if self._process and late.is_asked(folder) and late.in_progress(folder) is None:
                self._hung = True  # or it is about to end: the next call starts anew
                self._process.kill()
            elif late.asked(folder) and not self._process:
                context: Any = multiprocessing.get_context("forkserver")
                args = (*self._args, self._hung)
                process = context.Process(target=save_late, args=args, daemon=True)
                process.start()
                self._process = process

    def stop(self) -> None:
        """The pod ends: what is not finished is taken away, if the volume allows it at once."""
        if self._process is not None:
            self._process.terminate()
            self._process.join(STOP_S)


def save_late(config: Config, memory: Path, folder: Path, doubtful: bool = False) -> None:
    """Save the pod's newest snapshot; then a newer state, as long as saves take too long.

    To be run in a process of its own, which ends with the launcher. `doubtful`: see late.py.
    """
    die_with_launcher()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # unwinds: the unfinished files go
    try:
        with late.saving(folder, doubtful) as note:
            every_s, handed = _closed(config).checkpoint_every, False
            while found := _newer_than_any_checkpoint(config, memory):
                began = time.monotonic()
                note.write(store.name_of(found.step, found.generation))
                # The life that has handed it over writes its log itself, and has: this machine may
                # see that late. What a fault has left meanwhile is of a life that is over.
                logged = handed and (found.fault or {}).get("cause") == UNKNOWN
                name = _commit(config, found, read_back=True, logged=logged)
                if name is None:
                    break
                _say(f"checkpoint {name} is saved from memory")
                del found  # unmaps it
                took_s = time.monotonic() - began
                if took_s < every_s or not (handed := late.newer_state(folder, took_s)):
                    break
    except SystemExit:
        exit_now(0)
    except (OSError, Superseded) as error:
        _say(f"the state left in memory is not saved: {error}")


_say = partial(say, "gptddp.launch")
