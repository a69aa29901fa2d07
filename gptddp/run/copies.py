"""Copies for people, of what the ledger has. No state is taken from them.

A folder that has them and neither ledger nor checkpoint is refused at a start; an audit compares
them with the ledger.

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

WAIT_S = 5.0  # for a writing in flight

log = logging.getLogger(__name__)


def begin(run: Path, config: Mapping[str, Any], dataset: Mapping[str, Any]) -> threading.Thread:
    """Write down what a life runs with, after its first step: in a thread, as the disk may hang.

    To be joined for WAIT_S at the end of the life, as another may begin then.
    """

    def write() -> None:
        try:
            for name in (CONFIG, DATASET, FINISHED):  # of writers that were killed
                for rest in run.glob(f".{name}.*.tmp"):
                    rest.unlink(missing_ok=True)
            write_json_atomic(run / CONFIG, config)
            if not exists(run / DATASET):
                write_json_atomic(run / DATASET, dataset)
            (run / FINISHED).unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s is not what the run has now: %s", CONFIG, explain(error))

    thread = threading.Thread(target=write, name="copies", daemon=True)
    thread.start()
    return thread


def finish(run: Path, run_id: str, config: Mapping[str, Any], stop: Mapping[str, Any]) -> None:
    """The run is complete, as the event `stop` says. Raises OSError."""
    done = {name: stop[name] for name in ("generation", "step", "tokens", "train_s")}
    wanted = {name: config[name] for name in BUDGETS}
    marker = {"run_id": run_id, **done, **wanted, "time": time.time(), "cause": stop["cause"]}
    write_json_atomic(run / FINISHED, marker)
