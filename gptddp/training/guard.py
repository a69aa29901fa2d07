"""The end of a life by an error."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gptddp.distributed import environment, peers, storage
from gptddp.distributed.connect import World
from gptddp.distributed.report import report
from gptddp.errors import Diverged, GptddpError, Hung, LostPeer, NonFiniteError
from gptddp.run import crash_loop
from gptddp.run.origin import Origin
from gptddp.run.progress import Progress
from gptddp.training.end import SCRAPE_S, wait_for_scrape
from gptddp.training.recorder import Recorder
from gptddp.training.stalls import Stalls
from gptddp.training.stop import StopFlag


@dataclass
class Guard:
    """Around all that a life does; `hung` is for a thread of its own, where the main one hangs."""

    origin: Origin
    progress: Progress
    recorder: Recorder | None
    world: World
    stop: StopFlag
    stalls: Stalls
    restored: bool = False  # before it is, no hang is counted
    since: float = 0.0  # monotonic: the end of the last step

    @contextmanager
    def around(self) -> Iterator[None]:
        """A lost peer ends it (LostPeer), and so do ranks that differ (Diverged). An error of the
        trainer's own is counted (CrashLoopError the third time).
        """
        self.since = time.monotonic()
        try:
            yield
        except NonFiniteError:  # all ranks, in the same step
            self.stalls.over = True
            if self.recorder:
                self._record_end(
                    f"loss or gradient not finite {self.progress.skipped} times in a row"
                )
            if self.origin.config.metrics_port:
                with suppress(RuntimeError):  # a rank that is lost now changes nothing
                    wait_for_scrape(self.recorder, self.world, self.stop)  # all ranks
            raise
        except GptddpError:
            raise
        except Exception as error:
            if peers.is_lost_peer(error):
                blame, _ = peers.blame(error, self.world, time.monotonic() - self.since)
                if self.recorder:
                    self._record_end(blame)
                raise LostPeer(f"after step {self.progress.step}: {blame}") from error
            if isinstance(error, Diverged):
                if self.recorder:
                    about = {"ranks": error.ranks, "names": error.names}
                    self.recorder.events.emit("diverged", step=self.progress.step, **about)
            elif final := self._count(error):
                if self.recorder:
                    self.recorder.last_numbers()
                    while self.recorder.awaits_scrape and not self.stop.asked:
                        time.sleep(SCRAPE_S)
                raise final from error
            raise
        finally:
            if self.recorder:
                self.recorder.close()

    def _record_end(self, cause: str) -> None:
        """Rank 0 only: say how this life has ended; nobody else could."""
        assert self.recorder
        spent = self.recorder.spent
        about = {"phases": spent.by_phase(), "since_s": round(spent.since_s, 3), "survived": True}
        step, at = self.progress.step, time.time()
        self.recorder.events.emit("end", step=step, cause=cause, at=at, **about)

    def _count(self, error: Exception) -> GptddpError | None:
        """What ends the job, where too many lives have failed alike."""
        origin = self.origin
        if not origin.generation:  # an audit's: no life of the run has failed
            return None
        about = {"generation": origin.generation, "rank": self.world.rank}
        run, step = Path(origin.config.run_dir), self.progress.step + 1
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
        if self.recorder:
            self._record_end(f"rank {self.world.rank} ({environment.pod()}): {hung}")
        if reads or not (final := self._count(hung)):
            return hung.exit_code
        report(final)
        return final.exit_code
