"""The end of a life by an error."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gptddp.distributed import environment, storage
from gptddp.distributed.lost import blame, is_lost_peer
from gptddp.distributed.report import report
from gptddp.errors import (
    Diverged,
    GptddpError,
    Hung,
    LifeLost,
    LostPeer,
    NonFiniteError,
    Superseded,
)
from gptddp.run import crash_loop
from gptddp.training.end import wait_for_readers
from gptddp.training.parts import LifeParts


class Guard:
    """Handles the errors of a life; a separate thread calls `hung` when the main thread hangs."""

    def __init__(self, life: LifeParts) -> None:
        self._life = life
        self.restored = False  # False: no hang is counted yet
        self.since = 0.0  # monotonic: the end of the last step

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around a life. A lost peer ends it if no other world follows (LostPeer); so do ranks
        that differ (Diverged). An error of the trainer is counted (CrashLoopError the third time).
        """
        life = self._life
        self.since = time.monotonic()
        try:
            yield
        except NonFiniteError:  # all ranks, in the same step
            life.stalls.over = True
            if life.recorder:
                self._record_end(
                    f"loss or gradient not finite {life.progress.skipped} times in a row"
                )
            if life.config.metrics_port:
                with suppress(RuntimeError):  # a rank lost now changes nothing
                    wait_for_readers(life.recorder, life.world, life.stop)  # all ranks
            raise
        except Superseded as error:
            if life.world.is_static:
                raise
            raise LifeLost(str(error)) from error  # it returns as a new member
        except GptddpError:
            raise
        except Exception as error:
            if is_lost_peer(error):
                cause = blame(error, life.world, time.monotonic() - self.since)
                if life.recorder and self.restored:  # before that the ledger lacks its start
                    self._record_end(cause)
                raise LostPeer(f"after step {life.step}: {cause}") from error
            if isinstance(error, Diverged):
                if life.recorder and self.restored:
                    about = {"ranks": error.ranks, "names": error.names}
                    life.recorder.events.emit("diverged", step=life.step, **about)
            elif final := self._count(error):
                raise final from error
            raise
        finally:
            if life.recorder:
                life.recorder.close()

    def _record_end(self, cause: str) -> None:
        """Rank 0 only: record how this life ended; no other rank can."""
        life = self._life
        assert life.recorder
        spent = life.spent
        about = {"phases": spent.by_phase(), "since_s": round(spent.since_s, 3), "survived": True}
        life.recorder.events.emit("end", step=life.step, cause=cause, at=time.time(), **about)

    def _count(self, error: Exception) -> GptddpError | None:
        """The error that ends the job, if too many lives have failed alike; else None."""
        life = self._life
        is_own = isinstance(error, Hung) or not isinstance(error, LifeLost)
        if not is_own or not life.generation:  # 0: an audit
            return None
        about = {"generation": life.generation, "rank": life.world.rank}
        run, step = Path(life.config.run_dir), life.step + 1
        return crash_loop.final(error, run, step=step, pod=environment.pod(), **about)

    def hung(self, where: str) -> int:
        """In a thread: handle a hang of this rank; return the exit code for its process.

        A hang counts as an error of the trainer, with two exceptions: before the first step, where
        the cause is mostly a volume, and while it waits for a volume, which may recover.
        """
        reads, _ = storage.waited_for()
        hung = Hung(f"it {where}, waiting for {reads}" if reads else f"it {where}")
        if not self.restored:
            return hung.exit_code
        if self._life.recorder:
            self._record_end(f"rank {self._life.world.rank} ({environment.pod()}): {hung}")
        if reads or not (final := self._count(hung)):
            return hung.exit_code
        report(final)
        return final.exit_code
