"""Recompute a part of a run: each step must match the log, bit for bit."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gptddp.checkpoint.load import SavedState
from gptddp.config import Config
from gptddp.data.dataset import Dataset
from gptddp.data.loader import Batch
from gptddp.distributed.connect import World
from gptddp.errors import AuditError
from gptddp.model.gpt import GPT
from gptddp.model.sums import Sums
from gptddp.run.directory import LEDGER
from gptddp.run.lines import as_json
from gptddp.run.origin import Origin
from gptddp.training.agree import Agreed
from gptddp.training.clock import PhaseClock
from gptddp.training.life import Life
from gptddp.training.parts import DUE
from gptddp.training.stop import StopFlag

# The fields of a line that follow from the state before the step, causes first. Not times, speeds
# and the number of ranks.
FIELDS = ("batch_fp", "chain_fp", "tokens", "lr", "loss", "grad_norm")


class Difference(Exception):
    """The first step that differs from the log or a saved state, and the difference."""

    def __init__(self, step: int, what: str) -> None:
        super().__init__(f"step {step}: {what}")
        self.step = step


@dataclass(frozen=True)
class Span:
    """Steps of one configuration, from a state on.

    `lines`: of the log, by step. `prints`: fingerprints that the ledger has, by step. `quarantine`:
    decisions to leave row groups out, by step.
    """

    config: Config
    begin: SavedState
    end: int
    lines: Mapping[int, Mapping[str, Any]]
    prints: Mapping[int, Sequence[tuple[str, Any]]]
    quarantine: dict[int, list[int]]


class Replay(Life):
    """A life that writes nothing: it compares its lines with the log's."""

    def __init__(
        self, span: Span, dataset: Dataset, world: World, stop: StopFlag, run_id: str
    ) -> None:
        begin = span.begin
        origin = Origin(
            config=span.config,
            generation=0,
            step=begin.step,
            source=begin.name,
            run_id=run_id,
            quarantine={at: groups for at, groups in span.quarantine.items() if at >= begin.step},
        )
        super().__init__(origin, begin, None, dataset, world, stop, PhaseClock())
        self._span = span
        self.wrong: Difference | None = None
        if stop.asked:  # after the last step of the previous span
            self.cause = "stopped"

    @property
    def goes_on(self) -> bool:
        """Is there another step to compare?"""
        stopped = self.cause == "stopped"
        return not stopped and self.wrong is None and self.step < self._span.end

    def agree(self, batch: Batch) -> Agreed:
        """Agree on the step; take the time that decided its learning rate from its line."""
        line = self._span.lines.get(self.step + 1, {})
        seconds = line.get("train_s", self.progress.train_s)
        if type(seconds) in (int, float) and 0 <= seconds < math.inf:
            self.progress.train_s = seconds
        else:
            what = f"train_s is {seconds!r} in the log: it must be a number of seconds"
            self.wrong = Difference(self.step + 1, what)
        return super().agree(batch)

    def quarantine(self, batch: Batch) -> None:
        """Repeat a decision of the run; refuse a row group that only this copy cannot read."""
        if batch.bad not in self.origin.quarantine.get(self.step, ()):
            group = self.rows.loader.groups[batch.bad]
            raise AuditError(
                f"{group.path}, row group {group.index}, cannot be read here, but the run has read "
                f"it for step {self.step + 1}: put the file back, or give --data with a whole copy"
            )
        super().quarantine(batch)

    def complete_line(self) -> None:
        """Do nothing: a recomputed line has each field at once, as the log says which are due."""

    @property
    def is_evaluation_due(self) -> bool:
        """As in the run, or where the log has an evaluation."""
        return super().is_evaluation_due or not self._line.keys().isdisjoint(DUE[:2])

    @property
    def is_check_due(self) -> bool:
        """As in the run, where log or ledger have a fingerprint of the state, and at the end."""
        known = "state_fp" in self._line or "state_fp" in dict(self._prints)
        return super().is_check_due or known or self.step == self._span.end

    @property
    def _line(self) -> Mapping[str, Any]:
        return self._span.lines.get(self.step, {})

    @property
    def _prints(self) -> Sequence[tuple[str, Any]]:
        return self._span.prints.get(self.step, ())

    def record(self) -> None:
        """Compare the step with its line, and with its fingerprints in the ledger."""
        if not self._line:
            self.wrong = Difference(self.step, "it is not in the log")
            return
        due = [name for name in DUE if name in self.line and not self._may_lack(name)]
        for name in (*FIELDS, *due):
            there, here = self._line.get(name), as_json(self.line[name])
            if (type(there), there) != (type(here), here):
                self.wrong = _other(self.step, name, there, here)
                return
        here = self.progress.to_meta() | {"batch_fp": self.line["batch_fp"]}
        self.wrong = unlike(self.step, self._prints, here, LEDGER)

    def _may_lack(self, name: str) -> bool:
        """May the line of this step lack the field? The end of a span computes it anyway."""
        due = super().is_check_due if name == "state_fp" else super().is_evaluation_due
        return name not in self._line and not due

    def end(self) -> None:
        """End the loop; nothing is saved."""
        self.worlds.life_is_over = True

    def restore(self, net: GPT, tensors: Mapping[str, Tensor], sums: Sums) -> None:
        """Load the first state of the span into these tensors, and free it."""
        super().restore(net, tensors, sums)
        self._span.begin.tensors = {}
        self.wrong = unlike(self.step, self._prints, self.progress.to_meta(), LEDGER)

    def state(self) -> SavedState:
        """The live state, after the last recomputed step."""
        return SavedState("the log", self.step, self.tensors, self.progress.to_meta())


def unlike(
    step: int,
    there: Iterable[tuple[str, Any]],
    here: Mapping[str, Any],
    where: str,
    found_where: str = "recomputed",
) -> Difference | None:
    """The first of these fields of a step that differs from its state.

    Fields that the state lacks are not compared.
    """
    for name, value in there:
        if here.get(name) not in (None, value):
            return _other(step, name, value, here[name], where, found_where)
    return None


def _other(
    step: int,
    name: str,
    value: Any,
    found: Any,
    where: str = "the log",
    found_where: str = "recomputed",
) -> Difference:
    return Difference(step, f"{name} is {value!r} in {where}, but {found!r} {found_where}")
