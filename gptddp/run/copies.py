"""Copies of the ledger's values for people. No state is read from them.

A start refuses a folder that has copies but neither ledger nor checkpoint. An audit compares them
with the ledger.

config.json     the configuration, written after the first step of a life
dataset.json    the files of the data that the run began with; errors about other data name them
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

WAIT_S = 5.0  # for a write in progress

log = logging.getLogger(__name__)


def begin(run: Path, config: Mapping[str, Any], dataset: Mapping[str, Any]) -> threading.Thread:
    """Write the copies after a life's first step, in a thread, as the disk may hang.

    At the end of the life, join the thread for up to WAIT_S: another life may begin then.
    """

    def write() -> None:
        try:
            for name in (CONFIG, DATASET, FINISHED):  # temporary files of killed writers
                for rest in run.glob(f".{name}.*.tmp"):
                    rest.unlink(missing_ok=True)
            write_json_atomic(run / CONFIG, config)
            if not exists(run / DATASET):
                write_json_atomic(run / DATASET, dataset)
            (run / FINISHED).unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s is out of date: %s", CONFIG, explain(error))

    thread = threading.Thread(target=write, name="copies", daemon=True)
    thread.start()
    return thread


def finish(run: Path, run_id: str, config: Mapping[str, Any], stop: Mapping[str, Any]) -> None:
    """Mark the run as complete, by its event `stop`. Raises OSError."""
    done = {name: stop[name] for name in ("generation", "step", "tokens", "train_s")}
    wanted = {name: config[name] for name in BUDGETS}
    marker = {"run_id": run_id, **done, **wanted, "time": time.time(), "cause": stop["cause"]}
    write_json_atomic(run / FINISHED, marker)
