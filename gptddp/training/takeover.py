"""A new rank 0: lease, ledger, log and metrics are taken over while the steps go on.

The rank 0 before has left none of it in good order. What it has not brought to the disk all ranks
have kept (live_state.py). The books go on in a generation of their own, as after any life: so
whatever the lost one still writes is told from what this one does.
"""

import copy
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptddp.checkpoint import run_state, store
from gptddp.distributed.members import LeaseAsked
from gptddp.errors import Finished
from gptddp.files import patiently
from gptddp.run.history import highest_generation
from gptddp.run.lease import Claim, Lease
from gptddp.run.origin import Origin
from gptddp.training.parts import LifeParts
from gptddp.training.recorder import Recorder

_POLL_S = 0.25


class Takeover(threading.Thread):
    """Rank 0 only, from the loss of the one before until it has the books."""

    def __init__(
        self, life: LifeParts, event: Mapping[str, Any], lease: Lease | None, follows: bool
    ) -> None:
        """`lease`: where this process has had to take it before; `follows`: it is free, as a
        majority knows that its holder is not in the world.
        """
        super().__init__(name="takeover", daemon=True)
        self.events = [event]  # of the world, since then
        self._life, self._lease, self._follows = life, lease, follows
        # as of now: the steps go on meanwhile
        self._progress = copy.copy(life.progress)
        self._line, self._lines = dict(life.line), [dict(it) for it in life.live.lines.values()]
        self._kept, self._known = [*life.live.events], life.generation
        self._made: Recorder | None = None
        self._error: BaseException | None = None
        self.start()

    def recorder(self) -> Recorder | None:
        """The books, as soon as they are there. Raises what has kept this process from them."""
        if self._error is not None:
            raise self._error
        return self._made

    def run(self) -> None:
        """In the thread."""
        life, now = self._life, self._progress
        try:
            lease = self._lease or self._taken()
            books = life.dataset, lease, life.world, life.spent, life.stop
            recorder = Recorder(self._origin(), *books)
            about = life.tensors, life.net.n_params(), now, life.machines
            recorder.begin(*about, self._lines, self._kept)
            self._made = recorder
        except BaseException as error:
            self._error = error

    def _taken(self) -> Lease:
        run, world = Path(self._life.config.run_dir), self._life.world
        follows = [world.life] if self._follows else []
        claim = Claim(run, world.job, world.life, follows, known=True)
        while (lease := patiently(lambda: claim.poll(_POLL_S))) is None:
            pass
        return lease

    def _origin(self) -> Origin:
        """What the new generation begins with: the state that all ranks have."""
        life, now = self._life, self._progress
        run = Path(life.config.run_dir)
        recorded = patiently(lambda: run_state.read(run))
        if recorded.is_finished:  # the rank 0 before has come to the end of the run
            raise Finished(f"the run is finished at step {now.step}")
        highest = patiently(lambda: highest_generation(run, recorded))
        return Origin(
            config=life.config,
            generation=1 + max(highest, self._known),
            step=now.step,
            source="memory",
            run_id=life.origin.run_id,
            redo=max(0, life.origin.step + life.origin.redo - now.step),
            line=self._line or None,
            parent=patiently(lambda: store.newest(run, life.origin.run_id, recorded.commits)),
            quarantine=life.origin.quarantine,
        )


class Proof:
    """The run's lease as the proof that no other world goes on, where no majority can tell.

    In a tie who has the lease keeps it; all others wait until it has not been renewed for long.
    A minority that has it lets it go, and takes it again only where nobody else does.
    """

    def __init__(self, asked: LeaseAsked, life: LifeParts) -> None:
        """Raises Superseded where another has taken it."""
        self.asked = asked
        self._lease: Lease | None = None
        if life.recorder and asked.how == "tie":
            life.recorder.lease.check()
            self._lease = life.recorder.lease
        elif life.recorder:
            life.recorder.close()
            life.recorder = None
        run, world = Path(life.config.run_dir), life.world
        self._claim = Claim(run, world.job, world.life, known=True, patient=True)

    def held(self, seconds: float) -> Lease | None:
        """The lease, where this process has it now; waits for so long at most."""
        if self._lease is None:
            with suppress(OSError):  # of a volume that may be back soon
                self._lease = self._claim.poll(seconds)
        return self._lease
