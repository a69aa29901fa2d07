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
    """Around all that a life does; `hung` is for a thread of its own, where the main one hangs."""

    def __init__(self, life: LifeParts) -> None:
        self._life = life
        self.restored = False  # before it is, no hang is counted
        self.since = 0.0  # monotonic: the end of the last step

    @contextmanager
    def around(self) -> Iterator[None]:
        """A lost peer ends it where no other world follows (LostPeer), and so do ranks that differ
        (Diverged). An error of the trainer's own is counted (CrashLoopError the third time).
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
                with suppress(RuntimeError):  # a rank that is lost now changes nothing
                    wait_for_readers(life.recorder, life.world, life.stop)  # all ranks
            raise
        except Superseded as error:
            if life.world.is_static:
                raise
            raise LifeLost(str(error)) from error  # as another member it comes back
        except GptddpError:
            raise
        except Exception as error:
            if is_lost_peer(error):
                cause = blame(error, life.world, time.monotonic() - self.since)
                if life.recorder and self.restored:  # else the ledger has no start of it
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
        """Rank 0 only: say how this life has ended; nobody else could."""
        life = self._life
        assert life.recorder
        spent = life.spent
        about = {"phases": spent.by_phase(), "since_s": round(spent.since_s, 3), "survived": True}
        life.recorder.events.emit("end", step=life.step, cause=cause, at=time.time(), **about)

    def _count(self, error: Exception) -> GptddpError | None:
        """What ends the job, where too many lives have failed alike."""
        life = self._life
        is_own = isinstance(error, Hung) or not isinstance(error, LifeLost)
        if not is_own or not life.generation:  # 0: an audit's
            return None
        about = {"generation": life.generation, "rank": life.world.rank}
        run, step = Path(life.config.run_dir), life.step + 1
        return crash_loop.final(error, run, step=step, pod=environment.pod(), **about)

    def hung(self, where: str) -> int:
        """In a thread: this rank hangs, and its process is about to end with this exit code.

        An error of the trainer's own, but for a hang on the way to the first step, where it is
        mostly a volume, and for a volume that is waited for: it may come back.
        """
        reads = storage.waited_for()
        hung = Hung(f"it {where}, waiting for {reads}" if reads else f"it {where}")
        if not self.restored:
            return hung.exit_code
        if self._life.recorder:
            self._record_end(f"rank {self._life.world.rank} ({environment.pod()}): {hung}")
        if reads or not (final := self._count(hung)):
            return hung.exit_code
        report(final)
        return final.exit_code
