"""A new rank 0: lease, ledger, log and metrics are taken over while the steps go on.

The rank 0 before has left none of it in good order. What it has not brought to the disk all ranks
have kept (live_state.py). The records go on in a generation of their own, as after any life: so
whatever the lost one still writes is told from what this one does.
"""

import copy
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gptddp.checkpoint import run_state, store
from gptddp.distributed.members import SILENT_S, LeaseAsked
from gptddp.errors import Finished, LifeLost
from gptddp.files import exists, explain, make_folder, may_pass, patiently
from gptddp.run.history import highest_generation
from gptddp.run.lease import Claim, Lease
from gptddp.run.origin import Origin
from gptddp.training.parts import LifeParts
from gptddp.training.recorder import Recorder

_POLL_S = 0.25
_RETRY_S = 1.0  # after an error of the disk
_GONE = (
    "run directory %s is gone: it is made anew, and the run goes on with what the ranks have in "
    "memory. Put back what it had, as logs and checkpoints"
)

log = logging.getLogger(__name__)


class Takeover(threading.Thread):
    """Rank 0 only, from the loss of the one before until it has the records."""

    def __init__(
        self,
        life: LifeParts,
        event: Mapping[str, Any],
        end: Mapping[str, Any],
        lease: Lease | None,
        follows: bool,
    ) -> None:
        """`end`: of the rank 0 before, which may have been lost before the others knew its records.
        `lease`: where this process has had to take it before; `follows`: it is free, as a majority
        knows that its holder is not in the world.
        """
        super().__init__(name="takeover", daemon=True)
        self.events = [event]  # since then: of worlds, and what is left out
        self.lease = lease  # as soon as this process has it
        self._life, self._end, self._follows = life, end, follows
        self._is_over = False  # it is given up
        # as of now: the steps go on meanwhile
        self._progress = copy.copy(life.progress)
        self._line, self._lines = dict(life.line), [dict(it) for it in life.live.lines.values()]
        self._kept, self._known = [*life.live.events], life.generation
        self._made: Recorder | None = None
        self._error: BaseException | None = None
        self.start()

    def recorder(self) -> Recorder | None:
        """The records, as soon as they are there. Raises what has kept this process from them."""
        if self._error is not None:
            raise self._error
        return self._made

    def give_up(self) -> None:
        """No majority is heard any more, so another may have the records: let the lease go."""
        self._is_over = True
        if self.lease:
            self.lease.close()
        if self._made:
            self._made.close()

    def run(self) -> None:
        """In the thread. A volume that fails is waited for: the steps go on meanwhile.

        However it fails: this error would end the next new rank 0 too, until none has the state.
        """
        said = ""
        while not self._is_over and self._made is None:
            try:
                self._made = self._begun()
            except BaseException as error:
                if not (may_pass(error) or isinstance(error, OSError)):
                    self._error = error
                    break
                why = explain(error) if isinstance(error, OSError) else str(error)
                if why != said:
                    log.warning("rank 0 cannot take the records over yet: %s", why)
                said = why
                time.sleep(_RETRY_S)
        if self._is_over:  # since then
            self.give_up()

    def _begun(self) -> Recorder:
        life, now = self._life, self._progress
        self.lease = lease = self.lease or self._taken()
        origin = self._origin()
        recorder = Recorder(origin, life.dataset, lease, life.world, life.spent, life.stop)
        about = life.tensors, life.net.n_params(), now, life.machines
        last, kept = origin.generation - 1, self._kept
        if last > self._known:  # records that this rank has not heard of
            kept = [*kept, {**self._end, "generation": last}]
        try:
            recorder.begin(*about, self._lines, kept)
        except BaseException:  # the next try is another generation
            recorder.close()
            self.lease = None
            raise
        return recorder

    def _taken(self) -> Lease:
        run, world = Path(self._life.config.run_dir), self._life.world
        if not patiently(lambda: exists(run)):  # the next save of a rank 0 makes it too
            make_folder(run)
            log.warning(_GONE, run)
        follows = [world.life] if self._follows else []
        claim = Claim(run, world.job, world.life, follows, known=True)
        while (lease := patiently(lambda: claim.poll(_POLL_S))) is None:
            if self._is_over:
                raise LifeLost("the records are given up")
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

    def __init__(
        self, asked: LeaseAsked, life: LifeParts, takeover: Takeover | None, lease: Lease | None
    ) -> None:
        """`takeover`: that goes on, and may have the lease soon: a minority is to give it up.
        `lease`: the proof for a view before, which has not come to anything.

        Raises Superseded where another has taken the lease.
        """
        self.asked = asked
        self._lease = lease
        self._takeover = takeover
        if life.recorder and asked.how == "tie":
            self._lease = life.recorder.lease
        elif life.recorder:
            life.recorder.close()
            life.recorder = None
        if self._lease:
            self._lease.check()
        run, world = Path(life.config.run_dir), life.world
        silent_s = SILENT_S if asked.how == "tie" else 0.0
        self._claim = Claim(run, world.job, world.life, known=True, patient=True, silent_s=silent_s)

    def held(self, seconds: float) -> Lease | None:
        """The lease, where this process has it now; waits for so long at most."""
        if self._takeover:
            time.sleep(seconds)
            self._takeover.recorder()  # raises what has kept it from the records
            self._lease = self._takeover.lease
            if self._lease:
                self._lease.check()
        elif self._lease is None:
            with suppress(OSError):  # of a volume that may be back soon
                self._lease = self._claim.poll(seconds)
        return self._lease
