"""The parts of a life, for modules that work on several of them."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gptddp.budget import used_up
from gptddp.data.dataset import Dataset
from gptddp.distributed.connect import World
from gptddp.model.gpt import GPT
from gptddp.run.lease import Lease
from gptddp.run.origin import Origin
from gptddp.run.progress import Progress
from gptddp.training.clock import PhaseClock, RankSeconds
from gptddp.training.live_state import LiveState
from gptddp.training.recorder import Recorder
from gptddp.training.rows import Rows
from gptddp.training.stalls import Stall, Stalls
from gptddp.training.stop import StopFlag

# Fields that only some lines have, and get later than the other fields.
DUE = ("val_loss", "val_bpb", "state_fp")


class LifeParts:
    """The base of `Life`, which has the methods."""

    def __init__(
        self,
        origin: Origin,
        meta: Mapping[str, Any],
        lease: Lease | None,
        dataset: Dataset,
        world: World,
        stop: StopFlag,
        clock: PhaseClock,
    ) -> None:
        """`meta`: of the state from which the life continues."""
        self.origin, self.config = origin, origin.config  # of the run; every field has a value
        self.generation = origin.generation  # of the records; a new rank 0 opens another
        self.world, self.stop, self.clock, self.dataset = world, stop, clock, dataset
        self.progress = Progress.from_meta(meta)
        self.spent = RankSeconds(clock, world, world.device)
        self.recorder: Recorder | None = None
        if lease:
            self.recorder = Recorder(origin, dataset, lease, world, self.spent, stop)
        self.live = LiveState(origin)
        # Why the loop ends: "stopped", or the budget that is used up; "" while it continues.
        self.cause = used_up(origin.config, self.progress.step, self.progress.tokens)
        self.line: dict[str, Any] = {}  # line of the log, of the last finished step
        self.handed_on = -1  # the last step at which a rank got the state of another
        self.rows: Rows  # from `guard` on
        self.net: GPT  # from `restore` on
        self.tensors: Mapping[str, Tensor]  # the live ones, from `restore` on
        self.machines: list[str] = []  # hardware of the world's ranks
        self.stalls = Stalls(world, clock, self._stalled)

    def _stalled(self, stall: Stall) -> None:
        if self.recorder:
            self.recorder.stalled(stall)

    @property
    def step(self) -> int:
        """Finished optimizer steps of the run."""
        return self.progress.step

    def go_on(self, moved: bool) -> None:
        """See `Life`."""
        raise NotImplementedError

    def check_replicas(self) -> None:
        """See `Life`."""
        raise NotImplementedError

    def save(self) -> None:
        """See `Life`."""
        raise NotImplementedError
