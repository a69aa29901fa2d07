"""torchrun's rendezvous as a launcher needs it: `--rdzv-backend gptddp`, a world of one agent.

torchrun runs and watches the one worker of its launcher, and knows no other. The launchers' mesh
(`mesh.py`) agrees on the world, and the worker takes rank and world size from there. So the loss of
a peer is no event to torchrun, and ends no worker. The backend exists in the launcher's process
only, which runs only the trainer: another script would train a world of one in each pod.
"""

from collections.abc import Callable

from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "gptddp"
# The address for a script that takes its world from the environment: its connection fails.
NOWHERE = RendezvousStoreInfo("gptddp.invalid", 0)


def register(look: Callable[[], None]) -> None:
    """Make the backend known to torchrun in this process.

    torchrun's loop calls `look` while the worker lives; `look` raises to end the worker.
    """
    rendezvous_handler_registry.register(BACKEND, lambda params: _Alone(params, look))


class _Alone(RendezvousHandler):
    """Every method that torch calls: this agent is the whole world, and no agent ever waits."""

    def __init__(self, params: RendezvousParameters, look: Callable[[], None]) -> None:
        self._run_id, self._look = params.run_id, look

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(HashStore(), 0, 1, NOWHERE)

    def num_nodes_waiting(self) -> int:
        self._look()
        return 0

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def shutdown(self) -> bool:
        return True
