"""Rank 0's readable lines in its pod's log; log and ledger have nearly all of their facts."""

import logging
import re
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from gptddp import budget, live, units
from gptddp.checkpoint.run_state import why_ended
from gptddp.run import moves
from gptddp.run.code_of_steps import named
from gptddp.run.origin import Origin
from gptddp.run.owners import goodput
from gptddp.training import results
from gptddp.training.events import Event

_RECENT = 20  # steps; their median gives the remaining time
_NOTE, _WARN = logging.INFO, logging.WARNING
# By kind of event: the level of its line, and the text, which takes its fields. gptddp-k8s reads
# some of them (k8s/observe/rank_0_log.py).
_TEXTS = {
    "spike": (_WARN, "step {step}: {field} is {value:.4g}, where {usual:.4g} is usual"),
    "slow": (
        _WARN,
        "step {step}: {name} is slow: it takes {ratio:.1f} times as long as the ranks' median",
    ),
    "slow_end": (_NOTE, "step {step}: {name} is as fast as the others again"),
    "stall": (_WARN, "step {step} has not moved for {seconds:.0f} s: {where}"),
    "still": (_WARN, "step {step} has not moved for {seconds:.0f} s: {where}"),
    "stall_end": (_NOTE, "step {step} has moved, after {seconds:.0f} s"),
}

log = logging.getLogger(__name__)


class Console:
    """A sink of events."""

    def __init__(self, origin: Origin) -> None:
        self._origin, self._config = origin, origin.config
        # seconds of steps, with their rows; not of the first step of a life, which compiles
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._is_first = True
        self._unsaid: Event | None = None  # the last step, if it has no line yet
        self._goodput: float | None = None  # of the run; None: not known
        self._storage_fails = False
        self._faults = 0  # seen by this life: lost ranks, and a lost life before it
        self._bpb = ""  # of the newest evaluation

    def __call__(self, event: Event) -> None:
        """Take an event."""
        if event["event"] in _TEXTS:
            level, text = _TEXTS[event["event"]]
            log.log(level, "%s", text.format_map(event))
        elif action := getattr(self, f"_on_{event['event']}", None):
            action(event)

    def _on_end(self, event: Event) -> None:
        self._faults += 1
        # the cause may begin with the last step that a survivor has seen
        cause = re.sub(r"^after step \d+: ", "", event["cause"])
        log.warning("life %d ended after step %d: %s", event["generation"], event["step"], cause)

    def _on_world(self, event: Event) -> None:
        self._faults += bool(event["lost"])
        level = _WARN if event["lost"] else _NOTE
        log.log(level, "step %d: %s", event["step"], moves.moved(event))

    def _on_changed(self, event: Event) -> None:
        field, old, new = event["field"], event["old"], event["new"]
        if field == "code":
            old, new = named(old), named(new)
        log.info("changed after step %d: %s: %s -> %s", event["step"], field, old, new)

    def _on_start(self, event: Event) -> None:
        """Log what the run is, and where this life continues."""
        c, params, step = self._config, event["params"], event["step"]
        what = f"{c.preset}, {units.amount(params)} parameters, {c.precision} on {event['device']}"
        rows = f"{c.batch} rows of {c.seq_len} tokens a step"
        log.info("%s: %s, %s; %s", c.run_dir, what, _ranks(event["world_size"]), rows)
        redo = f", {event['redo']} steps to do again" if event["redo"] else ""
        end = f" of {c.steps}" if step <= (c.steps or 0) else ""
        where = f"from {event['source']}, step {step}{end}"
        log.info("life %d: %s%s", event["generation"], where, redo)

    def _on_step(self, event: Event) -> None:
        """Log a skipped step and an evaluation; show loss, speed and ETA: drawn on a terminal, or
        logged after the first step and every `log_every` steps.
        """
        line = event["line"]
        if line["loss"] is None:
            log.warning("step %d: loss or gradient not finite, step skipped", line["step"])
        if "val_loss" in line:
            self._evaluated(line)
        is_first, self._is_first = self._is_first, False
        if not is_first:
            self._recent.append(event["step_s"] + line["data_wait_s"])
        if event["owned"]:
            self._goodput = goodput(event["owned"])
        self._unsaid = event
        screen = live.screen()
        if screen and screen.is_due:
            screen.show(self._drawn(event))
        is_due = is_first or line["step"] % self._config.log_every == 0
        if is_due and not (screen and screen.draws):
            self._say_step()

    def _step(self, event: Event) -> list[str]:
        """Step, loss and, from the second step of a life on, ETA."""
        c, line, train_s = self._config, event["line"], event["train_s"]
        done = line["step"], line["tokens"], train_s
        parts = [f"step {budget.shown(c, *done)}", f"loss {units.loss(line['loss'])}"]
        if self._recent:
            left_s = (budget.last_step(c, *done) - line["step"]) * statistics.median(self._recent)
            if c.max_time:
                left_s = min(left_s, c.max_time - train_s)
            parts.append(f"ETA {units.duration(max(0, int(left_s)))}")
        return parts

    def _state(self, event: Event) -> list[str]:
        """Goodput, failing storage, slow ranks."""
        parts = [] if self._goodput is None else [f"goodput {units.percent(self._goodput)}"]
        if self._storage_fails:
            parts.append("storage fails")
        if slow := [f"{name} {ratio:.1f}x" for name, ratio in event["slow"].items()]:
            parts.append("slow: " + ", ".join(slow[:4]))
        return parts

    def _drawn(self, event: Event) -> list[str]:
        """The parts of the line on a terminal, the most important first."""
        parts = [*self._step(event), f"{units.amount(event['line']['tok_s'])} tok/s"]
        parts += [self._bpb] * bool(self._bpb)
        if self._faults:
            parts.append(units.many(self._faults, "fault"))
        return [*parts, *self._state(event)]

    def _say_step(self) -> None:
        """Log the line of the last step, once. gptddp-k8s reads it."""
        event, self._unsaid = self._unsaid, None
        if event is None:
            return
        line, (step, loss, *eta) = event["line"], self._step(event)
        parts = [step, loss, f"lr {line['lr']:.2e}", f"{units.amount(line['tok_s'])} tok/s"]
        parts += [_ranks(line["world_size"]), *eta, *self._state(event)]
        log.info("%s", "  ".join(parts))

    def _on_completed(self, event: Event) -> None:
        if event["evaluated"]:
            self._evaluated(event["line"])

    def _evaluated(self, line: Mapping[str, Any]) -> None:
        bpb = "" if line["val_bpb"] is None else f", {line['val_bpb']:.4f} bits a byte"
        log.info("step %d: validation loss %.4f%s", line["step"], line["val_loss"], bpb)
        self._bpb = "" if line["val_bpb"] is None else f"{line['val_bpb']:.3f} bits/byte"

    def _on_quarantine(self, event: Event) -> None:
        names = ", ".join(event["names"])
        log.warning("step %d: in quarantine from now on: %s", event["step"], names)

    def _on_storage(self, event: Event) -> None:
        self._storage_fails = event["fails"]
        if event["fails"]:
            log.error("STORAGE: %s; training continues, and retries", event["trouble"])
        else:
            log.warning("STORAGE: it works again")

    def _on_waiting(self, event: Event) -> None:
        minutes = event["limit_s"] / 60
        until = ", or until the end of the grace period" * event["stopped"]
        wait = f"waiting for the storage, at most {minutes:.0f} minutes{until}"
        log.warning("step %d was the last; %s", event["step"], wait)

    def _on_ended(self, event: Event) -> None:
        """Log how the life ended, where its last state is, and the results of the run."""
        self._say_step()
        step, cause = event["step"], event["cause"]
        verb = "stopped" if cause == "stopped" else "finished"
        log.info("%s after step %d: %s", verb, step, event["where"])
        nothing_done = cause == "steps" and step == self._origin.step
        if cause in ("max_tokens", "max_time") or nothing_done:
            log.info("%s", why_ended(self._config, cause, step))
        for text in results.lines(event["results"]) if event["results"] else ():
            log.info("%s", text)


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number != 1)}"
