"""What keeps a run directory small, however many lives the run has had."""

import contextlib
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from gptddp.files import explain
from gptddp.run import crash_loop, log_check, summary
from gptddp.run.directory import CONFIG, DATASET, SUMMARY
from gptddp.run.fold import fold

log = logging.getLogger(__name__)


class Tidier:
    """Rank 0 only: tidies up in a thread of its own. Nothing waits for it, nor depends on it."""

    def __init__(self, run_dir: Path, lost: Callable[[], str]) -> None:
        """`lost`: why the run is another's by now, if it is."""
        self._run, self._lost = run_dir, lost
        self._thread: threading.Thread | None = None
        self._looked = self._told = False

    def begin(self) -> None:
        """Begin to tidy up, unless it is at it."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="tidy", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        try:
            if not self._looked and (lacks := log_check.holes(self._run)):  # once a life
                log.warning("%s", log_check.told(self._run, lacks))
            self._looked = True
            tidy(self._run, self._lost)
        except OSError as error:
            if not self._told:  # once a life
                log.warning("old files of the run are not tidied up: %s", explain(error))
            self._told = True


def tidy(run_dir: Path, lost: Callable[[], str] = lambda: "") -> None:
    """Sum up the ledger, fold old logs, remove old records and what killed writers have left.

    Killed anywhere, it loses nothing that counts. Nothing is done where the run is another's
    (`lost` says why). Raises OSError.
    """
    if lost():
        return
    summary.refresh(run_dir)
    fold(run_dir, lost)
    crash_loop.prune(run_dir)
    for name in (CONFIG, DATASET, SUMMARY, "log.*.jsonl"):
        for path in run_dir.glob(f".{name}.*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
