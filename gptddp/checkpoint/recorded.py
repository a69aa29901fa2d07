"""What a run has recorded of itself: every reader of its state and configuration begins here.

The ledger says it. Where the ledger is lost, or has lost the start of a life that has saved, the
newest checkpoint says the run's id and the configuration that was in force. `config.json` and
`finished.json` are copies for people, which nothing reads.
"""

import errno
from pathlib import Path

from gptddp.checkpoint import store
from gptddp.config import Config
from gptddp.errors import Unusable
from gptddp.flags import from_saved
from gptddp.run import summary
from gptddp.run.directory import CHECKPOINTS, LEDGER
from gptddp.run.summary import Summary


def read(run_dir: str | Path) -> Summary:
    """The state of a run; an empty one where nothing of a run is there. Raises OSError."""
    found, root = summary.read(run_dir), Path(run_dir) / CHECKPOINTS
    for name in filter(store.is_candidate, store.names(run_dir)):
        if (store.order(name) or (0, 0))[0] <= found.life:
            break  # the ledger has the start of all that is older
        try:
            manifest = store.unsealed(root / name)
        except Unusable as unusable:
            if unusable.transient:
                raise OSError(errno.EIO, str(unusable), str(root)) from unusable
            continue
        run_id, config = manifest.get("run_id"), manifest.get("config")
        if isinstance(run_id, str) and found.run_id in (None, run_id):
            found.run_id = run_id
            if isinstance(config, dict):
                found.config = config
                break
    return found


def configuration(run_dir: str | Path) -> Config | None:
    """The configuration in force; None where no run is recorded.

    Raises ConfigError where it cannot be used, OSError.
    """
    config = read(run_dir).config
    return None if config is None else from_saved(Path(run_dir) / LEDGER, config)
