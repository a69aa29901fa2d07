"""Turn a command line into a life of a run, and the end of the life into an exit code."""

import logging
import sys
from collections.abc import Callable, Sequence

from gptddp import live
from gptddp.advice import advice
from gptddp.config import Config
from gptddp.data.dataset import open_dataset
from gptddp.distributed import environment
from gptddp.distributed.connect import World, connect
from gptddp.distributed.lost import is_lost_peer
from gptddp.distributed.pulse import Listening
from gptddp.distributed.report import VisibleFormatter, report, shown
from gptddp.distributed.torch_private import check_torch
from gptddp.errors import ConfigError, Finished, GptddpError, LifeLost, Stopped, Superseded
from gptddp.files import patiently
from gptddp.flags import flag, from_args
from gptddp.run import crash_loop
from gptddp.track.trackers import check_installed
from gptddp.training.begin import first_world, joined, newest_state
from gptddp.training.clock import PhaseClock
from gptddp.training.life import Life
from gptddp.training.stop import StopFlag

log = logging.getLogger("gptddp")


def main(train: Callable[[Life], None], args: Sequence[str] | None = None) -> int:
    """Parse, connect, train; return the exit code. A mistake gives one line, no traceback."""
    with shown() as screen:
        handler = logging.StreamHandler(screen)
        handler.setFormatter(VisibleFormatter("%(message)s"))
        logging.basicConfig(level=logging.INFO, handlers=[handler])
        return _run(train, args)


def _run(train: Callable[[Life], None], args: Sequence[str] | None) -> int:
    stop = StopFlag()
    try:
        config = patiently(lambda: from_args(sys.argv[1:] if args is None else args))
        for name in ("data", "run_dir"):
            if not getattr(config, name):
                raise ConfigError(f"{flag(name)} is missing; see `gptddp train --help`")
        check_installed(config.track)
        check_torch()
        listening = Listening(lambda where: stop.hung(where), lambda s: stop.silent(s))
        live.phase(f"starting the {'process group' if environment.is_launched() else 'device'}")
        with listening, connect(config.device) as world:
            train(begin(config, world, stop))
    except Finished as done:
        if environment.ranks().rank == 0:
            log.info("%s: %s", config.run_dir, done)
    except Stopped:
        return stop.exit_code  # rank 0 has logged the save
    except Superseded as error:  # its peers, if any, start again with it
        log.error("gptddp train: %s", error)
        return error.exit_code
    except GptddpError as error:
        report(error)
        return error.exit_code
    except Exception as error:
        if is_lost_peer(error) or isinstance(error, LifeLost):
            what = "lost a peer: " if is_lost_peer(error) else ""
            reason = str(error).splitlines()[0]
            log.warning("[rank %s] %s%s", environment.ranks().rank, what, reason)
            return stop.exit_code if stop.asked else LifeLost.exit_code
        if final := crash_loop.early(error):
            report(final)
            return final.exit_code
        raise
    finally:
        stop.close()
    # a launcher that forwarded a signal does not expect success any more
    return stop.exit_code if stop.asked and environment.members() else 0


def begin(config: Config, world: World, stop: StopFlag) -> Life:
    """All ranks: a new life of the run, from the newest valid state on disk or in memory.

    Raises ConfigError, DataError and CheckpointError, on every rank, as `open_run` does.
    """
    clock = PhaseClock()  # assigns every second from here on to one phase
    # Damage is refused before anything is written, or below, where the run's on_bad is known.
    live.phase("opening the dataset")
    dataset = patiently(lambda: open_dataset(config.data, config.on_bad or "quarantine"))
    tokenizer = patiently(dataset.tokenizer)
    if first_world(world):
        found = newest_state(config, dataset, world, clock)  # all ranks
        life = Life(*found, dataset, world, stop, clock)
    else:  # the life runs already
        life = Life(joined(config, dataset, world), None, None, dataset, world, stop, clock)
    notes = [*dataset.warnings(), *tokenizer.warnings(), *advice(life.config, world.world_size)]
    for warning in notes if world.rank == 0 else ():
        log.warning("%s", warning)
    return life
