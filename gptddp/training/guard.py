"""The end of a life by an error: where it is a lost peer, a hang or a takeover, the state stays."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gptddp.distributed import connect, environment, lost, pulse, storage
from gptddp.distributed.connect import World
from gptddp.distributed.report import report
from gptddp.errors import Diverged, GptddpError, Hung, LostPeer, NonFiniteError, Superseded
from gptddp.run import crash_loop
from gptddp.run.progress import Progress
from gptddp.training.end import SCRAPE_S, wait_for_scrape
from gptddp.training.live_state import LiveState
from gptddp.training.recorder import Recorder
from gptddp.training.stalls import Stalls
from gptddp.training.stop import StopFlag


@dataclass
class Guard:
    """Around all that a life does; `hung` is for a thread of its own, where the main one hangs."""

    live: LiveState
    progress: Progress
    recorder: Recorder | None
    world: World
    stop: StopFlag
    stalls: Stalls
    restored: bool = False  # before it is, there is no state to leave
    since: float = 0.0  # monotonic: the end of the last step

    @contextmanager
    def around(self) -> Iterator[None]:
        """A lost peer leaves the live state in memory (LostPeer), and so does another job that has
        taken over the run: it may end before it has saved anything. Ranks that differ leave nothing
        (Diverged). An error of the trainer's own is counted (CrashLoopError the third time).
        """
        self.since = time.monotonic()
        try:
            yield
        except Superseded as error:
            self.live.leave_snapshot(str(error))
            raise
        except NonFiniteError:  # all ranks, in the same step
            self.stalls.over = True
            if self.recorder:
                self._record_end(
                    f"loss or gradient not finite {self.progress.skipped} times in a row"
                )
            if self.live.origin.config.metrics_port:
                with suppress(RuntimeError):  # a rank that is lost now changes nothing
                    wait_for_scrape(self.recorder, self.world, self.stop)  # all ranks
            raise
        except GptddpError:
            raise
        except Exception as error:
            pulse.allow(connect.FIRST_TIMEOUT_S)  # what follows may be long: a snapshot of any size
            if lost.is_lost_peer(error):  # no step is half done: its collectives come before it
                blame = lost.blame(error, self.world, time.monotonic() - self.since)
                cause = f"after step {self.progress.step}: {blame}"
                self.live.leave_snapshot(cause)
                raise LostPeer(cause) from error
            if isinstance(error, Diverged):
                self.live.remove_snapshot()
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
        spent = self.live.spent
        about = {"phases": spent.by_phase(), "since_s": round(spent.since_s, 3), "survived": True}
        step, at = self.progress.step, time.time()
        self.recorder.events.emit("end", step=step, cause=cause, at=at, **about)

    def _count(self, error: Exception) -> GptddpError | None:
        """What ends the job, where too many lives have failed alike."""
        origin = self.live.origin
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
        self.live.leave_snapshot(f"rank {self.world.rank} ({environment.pod()}): {hung}")
        if reads or not (final := self._count(hung)):
            return hung.exit_code
        report(final)
        return final.exit_code
