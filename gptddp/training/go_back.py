"""--from-step: the run goes back to a kept checkpoint, and abandons its later steps.

The branch is written to the ledger first. Then the checkpoint is committed again, under the
generation of the new life. So it is newer than all others, and every load or prune finds it. If a
life is killed in between, the next life finishes the branch.
"""

import logging
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from gptddp.checkpoint import store
from gptddp.checkpoint.load import SavedState, load_newest
from gptddp.checkpoint.writer import Writer
from gptddp.config import Config
from gptddp.distributed.waiting import Tell
from gptddp.errors import CheckpointError, ConfigError
from gptddp.files import explain, may_pass, patiently
from gptddp.flags import to_saved
from gptddp.run.branches import about, asks_for_another
from gptddp.run.history import Ledger
from gptddp.run.summary import Summary

log = logging.getLogger(__name__)


def go_back(
    given: Config,
    config: Config,
    run_id: str,
    generation: int,
    recorded: Summary,
    fence: Callable[[], None],
    tell: Tell,
) -> None:
    """Rank 0 only, before the search for the newest state: begin the requested branch.

    `given`: the configuration given to this start; `config`: the complete one; `fence` raises
    Superseded if another life has the run by now. Also finishes a branch in the ledger that has
    no state yet, for any `given`. Raises ConfigError if no checkpoint of that step exists, or
    the run cannot be written; CheckpointError if no checkpoint of that step is valid; OSError
    for trouble of the volume that may pass.
    """
    run, new = Path(config.run_dir), asks_for_another(given, recorded.branches)
    if not new and (not recorded.branches or _has_state(run, run_id, recorded)):
        return
    step = config.from_step if new else int(recorded.branches[-1]["step"])
    tell(f"looking for a checkpoint of step {step}")
    known = recorded.commits
    loaded = load_newest(run, run_id, set_aside=False, known=known, tell=tell, step=step)
    assert loaded  # or an error was raised
    log.warning("run %s goes back to %s: its later steps are abandoned", run, loaded.name)
    try:
        if new:
            fence()
            _record(config, generation, loaded, recorded)
        _commit(config, run_id, generation, loaded, fence, tell)
    except OSError as error:
        if may_pass(error):
            raise
        raise ConfigError(
            f"--from-step {step}: {run} cannot be written: {explain(error)}"
        ) from error


def _has_state(run: Path, run_id: str, recorded: Summary) -> bool:
    """Is there a checkpoint of the newest branch?"""
    newest = store.order(patiently(lambda: store.newest(run, run_id, recorded.commits)))
    return newest[0] >= int(recorded.branches[-1]["generation"])


def _record(config: Config, generation: int, loaded: SavedState, recorded: Summary) -> None:
    """Write the branch durably. Raises OSError."""
    branch = {"step": loaded.step, "life": loaded.generation, "name": loaded.name, **about(config)}
    with closing(Ledger(config.run_dir)) as file:
        file.event("branch", generation, **branch)
        patiently(file.sync)
    recorded.add({"event": "branch", "time": time.time(), "generation": generation, **branch})


def _commit(
    config: Config,
    run_id: str,
    generation: int,
    loaded: SavedState,
    fence: Callable[[], None],
    tell: Tell,
) -> None:
    """Commit the checkpoint again, as one of this life. Raises OSError, CheckpointError."""
    writer = Writer(
        config.run_dir,
        generation,
        run_id=run_id,
        config=to_saved(config),
        parent=loaded.name,
        keep=0,  # delete nothing: it could be `loaded`
        before_commit=fence,
    )
    began = time.monotonic()
    writer.submit(loaded.step, loaded.tensors, loaded.meta, anew=True)
    while not writer.wait(1.0):
        tell(f"saving {loaded.name} again, for {time.monotonic() - began:.0f} s")
    if isinstance(writer.failure, CheckpointError):
        raise CheckpointError(f"{loaded.name} cannot be saved again: {writer.failure}")
    if writer.failure:
        raise writer.failure


def way_back(run: Path, bad: int) -> str:
    """How to go back to before step `bad`, the first non-finite or far too large one.

    The update of the previous step may have spoilt the weights, so an older checkpoint is better.
    """
    names: list[str] = []
    with suppress(OSError):
        names = list(filter(store.is_candidate, store.names(run)))
    found = [step for name in names if (step := store.order(name)[1]) < bad]
    best = next((step for step in found if step < bad - 1), found[0] if found else None)
    if best is not None:
        return f"to go back to step {best}: --from-step {best}, with a lower --lr"
    if names:
        return "no earlier checkpoint is kept: begin again with a lower --lr, in another --run-dir"
    return "no checkpoint was saved yet: start again from step 0 with a lower --lr"
