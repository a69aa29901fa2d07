"""A new rank 0 takes over lease, ledger, log and metrics while the steps continue.

The previous rank 0 closed none of them. All ranks have kept the records that it did not write to
disk (live_state.py). The records continue in a new generation, as after any life: so late writes of
the lost rank 0 can be distinguished from those of the new one.
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
    "run directory %s is missing: it is created again, and the run continues with the ranks' state "
    "in memory. Put its logs and checkpoints back from a backup"
)

log = logging.getLogger(__name__)


class Takeover(threading.Thread):
    """Rank 0 only, from the loss of the previous rank 0 until it has the records."""

    def __init__(
        self,
        life: LifeParts,
        event: Mapping[str, Any],
        end: Mapping[str, Any],
        lease: Lease | None,
        follows: bool,
    ) -> None:
        """`end`: of the previous rank 0, which may have been lost before the others knew its
        records. `lease`: the lease, if this process has already taken it as the proof for a view;
        `follows`: the lease is free, because a majority knows that its holder is not in the world.
        """
        super().__init__(name="takeover", daemon=True)
        self.events = [event]  # since then: of worlds and quarantines
        self.lease = lease  # as soon as this process has it
        self._life, self._end, self._follows = life, end, follows
        self._is_over = False  # the takeover is given up
        # copies, because the steps continue meanwhile
        self._progress = copy.copy(life.progress)
        self._line, self._lines = dict(life.line), [dict(it) for it in life.live.lines.values()]
        self._kept, self._known = [*life.live.events], life.generation
        self._made: Recorder | None = None
        self._error: BaseException | None = None
        self.start()

    def recorder(self) -> Recorder | None:
        """The recorder, None until it is ready. Raises the error that prevents the takeover."""
        if self._error is not None:
            raise self._error
        return self._made

    def catch_up(self, recorder: Recorder) -> None:
        """Add to the records what has happened while they were taken over."""
        life = self._life
        # decisions that this rank has learned since then, from a rank with the state
        known = [_decision(it) for it in [*self._kept, *self.events]]
        learned = [it for it in life.live.events if _decision(it) not in (None, *known)]
        for event in [*self.events, *learned]:
            event = {**event, "generation": recorder.generation}
            if event["event"] == "world":
                recorder.moved(event)
            else:
                recorder.events.emit("quarantine", **event)
        for step, line in life.live.lines.items():
            if step > recorder.origin.step:
                recorder.step(line, life.progress, 0.0)
            elif step == recorder.origin.step and line != recorder.line:  # evaluated since
                recorder.completed(line, "val_loss" in line)

    def give_up(self) -> None:
        """Stop renewing the lease: without a majority another rank may have the records."""
        self._is_over = True
        if self.lease:
            self.lease.close()
        if self._made:
            self._made.close()

    def run(self) -> None:
        """In the thread. Waits for a volume that fails: the steps continue meanwhile.

        It waits after any OSError: the error would end each next rank 0 too, and so lose the state.
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
                    log.warning("rank 0 cannot take over the records yet: %s", why)
                said = why
                time.sleep(_RETRY_S)
        if self._is_over:  # given up meanwhile
            self.give_up()

    def _begun(self) -> Recorder:
        life, now = self._life, self._progress
        self.lease = lease = self.lease or self._taken()
        origin = self._origin()
        recorder = Recorder(origin, life.dataset, lease, life.world, life.spent, life.stop)
        about = life.tensors, life.net.n_params(), now, life.machines
        last, kept = origin.generation - 1, self._kept
        if last > self._known:  # records of a generation that this rank does not know
            kept = [*kept, {**self._end, "generation": last}]
        try:
            recorder.begin(*about, self._lines, kept)
        except BaseException:  # the next try opens another generation
            recorder.close()
            self.lease = None
            raise
        return recorder

    def _taken(self) -> Lease:
        run, world = Path(self._life.config.run_dir), self._life.world
        if not patiently(lambda: exists(run)):  # rank 0's next save would make it too
            make_folder(run)
            log.warning(_GONE, run)
        follows = [world.life] if self._follows else []
        claim = Claim(run, world.job, world.life, follows, known=True)
        while (lease := patiently(lambda: claim.poll(_POLL_S))) is None:
            if self._is_over:
                raise LifeLost("the records are given up")
        return lease

    def _origin(self) -> Origin:
        """The origin of the new generation: the state of all ranks."""
        life, now = self._life, self._progress
        run = Path(life.config.run_dir)
        recorded = patiently(lambda: run_state.read(run))
        if recorded.is_finished:  # the previous rank 0 has finished the run
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


def _decision(event: Mapping[str, Any]) -> tuple[int, list[int]] | None:
    """The step and the row groups of a quarantine; None of another event."""
    is_one = event["event"] == "quarantine"
    return (event["step"], event["row_groups"]) if is_one else None


class Proof:
    """The run's lease as the proof that no other world runs, where no majority decides.

    In a tie the holder keeps the lease; all others wait until it has not been renewed for long.
    A minority stops renewing it, and takes it again only if no other process has taken it.
    """

    def __init__(
        self, asked: LeaseAsked, life: LifeParts, takeover: Takeover | None, lease: Lease | None
    ) -> None:
        """`takeover`: still running, and may have the lease soon; None in a minority.
        `lease`: the proof for an earlier view that was not formed.

        Raises Superseded if another process has taken the lease.
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
        """The lease, if this process has it now; waits for this long at most."""
        if self._takeover:
            time.sleep(seconds)
            self._takeover.recorder()  # raises its error
            self._lease = self._takeover.lease
            if self._lease:
                self._lease.check()
        elif self._lease is None:
            with suppress(OSError):  # of a volume that may recover soon
                self._lease = self._claim.poll(seconds)
        return self._lease
