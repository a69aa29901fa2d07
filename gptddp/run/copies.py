"""Copies for people, of what the ledger has: nothing of ours goes by them.

config.json     the configuration, once a step was done with it
dataset.json    the files of the data that the run began with; a refusal of others names them by it
finished.json   the run is complete
"""

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gptddp.budget import BUDGETS
from gptddp.files import exists, explain, write_json_atomic
from gptddp.run.directory import CONFIG, DATASET, FINISHED

RETRY_S = 10.0  # after an error of the disk
CLOSE_S = 5.0

log = logging.getLogger(__name__)


class Copies(threading.Thread):
    """Writes down what a life runs with, in a thread: the disk may hang, or be full for a while.

    To be started after the first step of the life.
    """

    def __init__(self, run: Path, config: Mapping[str, Any], dataset: Mapping[str, Any]) -> None:
        super().__init__(name="copies", daemon=True)
        self._run, self._config, self._dataset = run, config, dataset
        self._over = threading.Event()

    def close(self) -> None:
        """Try no more, as another life may have begun; the try in flight is waited for."""
        self._over.set()
        self.join(CLOSE_S)

    def run(self) -> None:
        told = False
        while True:
            try:
                return self._write()
            except OSError as error:
                if not told:
                    log.warning("%s is not what the run has now: %s", CONFIG, explain(error))
                told = True
            if self._over.wait(RETRY_S):
                return

    def _write(self) -> None:
        for name in (CONFIG, DATASET, FINISHED):  # of writers that were killed
            for rest in self._run.glob(f".{name}.*.tmp"):
                rest.unlink(missing_ok=True)
        write_json_atomic(self._run / CONFIG, self._config)
        if not exists(self._run / DATASET):
            write_json_atomic(self._run / DATASET, self._dataset)
        (self._run / FINISHED).unlink(missing_ok=True)


def finish(run: Path, run_id: str, config: Mapping[str, Any], stop: Mapping[str, Any]) -> None:
    """The run is complete, as the event `stop` says. Raises OSError."""
    done = {name: stop[name] for name in ("generation", "step", "tokens", "train_s")}
    wanted = {name: config[name] for name in BUDGETS}
    marker = {"run_id": run_id, **done, **wanted, "time": time.time(), "cause": stop["cause"]}
    write_json_atomic(run / FINISHED, marker)
