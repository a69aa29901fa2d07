"""What rank 0 says of a life to its reader, in lines of its pod's log."""

import logging
import re
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gptddp import budget
from gptddp.run.in_force import why_ended
from gptddp.run.origin import Origin
from gptddp.run.progress import Progress
from gptddp.training.stalls import Stall

_RECENT = 20  # steps, by which the time that is left is known

log = logging.getLogger(__name__)


class Console:
    """Rank 0 only: the readable lines; the JSON log has all of it."""

    def __init__(self, origin: Origin) -> None:
        self.origin, self.config = origin, origin.config
        self._recent: deque[float] = deque(maxlen=_RECENT)  # seconds of steps, with their rows
        self._unsaid: Callable[[], None] | None = None  # the line of the last step, if it had none

    def began(self, params: int, device: str, world_size: int) -> None:
        """The run and where this life goes on."""
        c, origin = self.config, self.origin
        size = f"{params / 1e6:.1f} M" if params >= 1e5 else f"{params / 1e3:.1f} k"
        what = f"{c.preset}, {size} parameters, {c.precision} on {device}"
        rows = f"{c.batch} rows of {c.seq_len} tokens a step"
        log.info("%s: %s, %s; %s", c.run_dir, what, _ranks(world_size), rows)
        redo = f", {origin.redo} steps to do again" if origin.redo else ""
        end = f" of {c.steps}" if origin.step <= (c.steps or 0) else ""
        where = f"from {origin.source}, step {origin.step}{end}"
        log.info("life %d: %s%s", origin.generation, where, redo)

    def fault(self, generation: int, step: int, cause: str) -> None:
        """How a life has ended that could not say so itself."""
        cause = re.sub(r"^after step \d+: ", "", cause)  # the last one that a survivor has seen
        log.warning("life %d ended after step %d: %s", generation, step, cause)

    def slow(self, step: int, name: str, ratio: float) -> None:
        """A rank is slower than the others for a while now."""
        text = "step %d: %s is slow: it takes %.1f times as long as the ranks' median"
        log.warning(text, step, name, ratio)

    def fast(self, step: int, name: str) -> None:
        """It is not any more."""
        log.info("step %d: %s is as fast as the others again", step, name)

    def stalled(self, stall: Stall) -> None:
        """A step does not move, and where the ranks are."""
        text = "step %d has not moved for %.0f s: %s"
        log.warning(text, stall.step, stall.seconds, stall.text)

    def moves(self, step: int, seconds: float) -> None:
        """It has moved after all."""
        log.info("step %d has moved, after %.0f s", step, seconds)

    def step(
        self,
        line: Mapping[str, Any],
        progress: Progress,
        step_s: float,
        goodput: float | None = None,
        slow: Sequence[tuple[str, float]] = (),
        trouble: bool = False,
    ) -> None:
        """A step that is skipped, an evaluation; every `log_every` steps loss, speed, time left.

        `goodput`: of the run; `slow`: names of ranks that are slow, and how many times the median;
        `trouble`: the storage fails at present.
        """
        if line["loss"] is None:
            log.warning("step %d: loss or gradient not finite, step skipped", line["step"])
        if "val_loss" in line:
            self.evaluated(line)
        self._recent.append(step_s + line["data_wait_s"])
        done = progress.step, progress.tokens, progress.train_s
        self._unsaid = partial(self._step, line, done, goodput, slow, trouble)
        if line["step"] % self.config.log_every == 0:
            self._say()

    def _say(self) -> None:
        if self._unsaid:
            self._unsaid()
        self._unsaid = None

    def _step(
        self,
        line: Mapping[str, Any],
        done: tuple[int, int, float],
        goodput: float | None,
        slow: Sequence[tuple[str, float]],
        trouble: bool,
    ) -> None:
        c, (step, _, train_s) = self.config, done
        left_s = (budget.last_step(c, *done) - step) * statistics.median(self._recent)
        if c.max_time:
            left_s = min(left_s, c.max_time - train_s)
        left = max(0, int(left_s))
        loss = "not finite" if line["loss"] is None else f"{line['loss']:.4f}"
        where = f"step {budget.shown(c, *done)}  loss {loss}  lr {line['lr']:.2e}"
        speed = f"{line['tok_s'] / 1e3:.1f}k tok/s  {_ranks(line['world_size'])}"
        rest = "" if goodput is None else f"  goodput {100 * goodput:.0f}%"
        rest += "  storage fails" * trouble
        if slow:
            rest += "  slow: " + ", ".join(f"{name} {ratio:.1f}x" for name, ratio in slow[:4])
        log.info("%s  %s  %d:%02d left%s", where, speed, left // 60, left % 60, rest)

    def evaluated(self, line: Mapping[str, Any]) -> None:
        """The losses of an evaluation."""
        bpb = "" if line["val_bpb"] is None else f", {line['val_bpb']:.4f} bits a byte"
        log.info("step %d: validation loss %.4f%s", line["step"], line["val_loss"], bpb)

    def quarantined(self, step: int, names: Sequence[str]) -> None:
        """Row groups that are left out for good."""
        log.warning("step %d: in quarantine from now on: %s", step, ", ".join(names))

    def storage(self, trouble: str | None) -> None:
        """The storage has begun to fail, or works again."""
        if trouble:
            log.error("STORAGE: %s; training goes on, and tries again", trouble)
        else:
            log.warning("STORAGE: it works again")

    def mended(self, error: str) -> None:
        """The storage has failed once, and has taken the same at the next try."""
        log.warning("%s; it was tried again, and works", error)

    def waiting(self, step: int, limit_s: float, stopped: bool) -> None:
        """The last checkpoint takes its time."""
        until = ", or until the end of the grace period" * stopped
        wait = f"waiting for the storage, at most {limit_s / 60:.0f} minutes{until}"
        log.warning("step %d was the last; %s", step, wait)

    def ended(self, step: int, cause: str, where: str) -> None:
        """The life is over; `where` its last state is."""
        self._say()
        verb = "stopped" if cause == "stopped" else "finished"
        log.info("%s after step %d: %s", verb, step, where)
        if cause in ("max_tokens", "max_time") or (cause == "steps" and step == self.origin.step):
            log.info("%s", why_ended(self.config, cause, step))

    def results(self, lines: Sequence[str]) -> None:
        """What has come out of the run, a line each: for grep."""
        for line in lines:
            log.info("%s", line)


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"
