"""A part of a run, lived again: each step has to come out as the log has it, bit for bit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gptddp.config import Config
from gptddp.data.loader import Batch
from gptddp.distributed.connect import World
from gptddp.errors import GptddpError
from gptddp.model.evaluate import Evaluation
from gptddp.run.lines import as_json
from gptddp.run.origin import Origin
from gptddp.training.agree import Agreed
from gptddp.training.choose import NewestState
from gptddp.training.life import Life
from gptddp.training.metrics import PhaseClock
from gptddp.training.stop import StopFlag

# What a line says of a step that follows from the state before it, causes first. Not its times and
# speeds, and not how many ranks there were.
FIELDS = ("batch_fp", "chain_fp", "tokens", "lr", "loss", "grad_norm")
DUE = ("val_loss", "val_bpb", "state_fp")  # of some steps


@dataclass(frozen=True)
class Wrong:
    """The first step that is not what was logged or saved."""

    step: int
    field: str
    logged: Any
    found: Any
    where: str = "the log"


@dataclass(frozen=True)
class State:
    """The state after a step: tensors by name, and `Progress` as a checkpoint has it.

    None and {}: as the seed makes them. wrong: why a checkpoint is not what it says itself.
    """

    step: int
    name: str
    tensors: Mapping[str, Tensor] | None
    meta: dict[str, Any]
    wrong: Wrong | None = None


@dataclass
class Span:
    """Steps of one configuration, from a state on.

    `lines`: of the log, by step. `quarantine`: decisions to leave row groups out, by step. `after`:
    the state at the end, when it has been recomputed.
    """

    config: Config
    begin: State
    end: int
    lines: Mapping[int, Mapping[str, Any]]
    quarantine: dict[int, list[int]]
    after: State | None = None

    @property
    def step(self) -> int:
        return self.begin.step


class Replay(Life):
    """A life that writes nothing: it compares its lines with those of the log."""

    def __init__(self, span: Span, world: World, stop: StopFlag, run_id: str) -> None:
        state = NewestState(_origin(run_id, span), 0, span.begin.tensors, [], [], None, None, None)
        super().__init__(state, world, stop, PhaseClock())
        self._span = span
        self.wrong: Wrong | None = None
        if stop.asked:  # since the last step of the span before
            self.cause = "stopped"

    @property
    def goes_on(self) -> bool:
        """Is there another step to compare?"""
        stopped = self.cause == "stopped"
        return not stopped and self.wrong is None and self.step < self._span.end

    def agree(self, batch: Batch) -> Agreed:
        """What this step is; the time that decided its rate is taken from its line."""
        line = self._span.lines.get(self.step + 1, {})
        self.progress.train_s = line.get("train_s", self.progress.train_s)
        return super().agree(batch)

    def complete_line(self, validate: Callable[[], Evaluation | None]) -> None:
        """No line is missing anything: see `record`."""

    @property
    def is_evaluation_due(self) -> bool:
        """As in the run, or where the log says that it was."""
        return super().is_evaluation_due or "val_loss" in self._line

    @property
    def is_check_due(self) -> bool:
        """As in the run, where the log has a fingerprint of the state, and at the end."""
        return super().is_check_due or "state_fp" in self._line or self.step == self._span.end

    @property
    def _line(self) -> Mapping[str, Any]:
        return self._span.lines.get(self.step, {})

    def record(self) -> None:
        """Compare the step with its line."""
        if not self._line:
            self.wrong = Wrong(self.step, "step", None, self.step)
            return
        due = [name for name in DUE if name in self.line and not self._may_lack(name)]
        for name in (*FIELDS, *due):
            there, found = self._line.get(name), as_json(self.line[name])
            if there != found:
                self.wrong = Wrong(self.step, name, there, found)
                return

    def _may_lack(self, name: str) -> bool:
        """Is this of no step that must have it? It is computed at the end of the span anyway."""
        due = super().is_check_due if name == "state_fp" else super().is_evaluation_due
        return name not in self._line and not due

    def end(self) -> None:
        """There is nothing to save."""

    def _count_failure(self, error: Exception) -> GptddpError | None:
        """No life of the run has failed."""
        return None

    def restore(self, tensors: Mapping[str, Tensor], n_params: int) -> None:
        """The state that the span begins with into these tensors; it is not held any longer."""
        super().restore(tensors, n_params)
        self._span.begin = replace(self._span.begin, tensors=None)

    def state(self) -> State:
        """The live state, after the last step that was recomputed."""
        return State(self.step, "the log", self._tensors, self.progress.to_meta())


def _origin(run_id: str, span: Span) -> Origin:
    step = span.step
    return Origin(
        config=span.config,
        changes=[],
        generation=0,
        step=step,
        meta=span.begin.meta,
        source=span.begin.name,
        redo=0,
        last_line=None,
        line=None,
        run_id=run_id,
        parent=None,
        snapshot_rank=None,
        late=None,
        quarantine={at: groups for at, groups in span.quarantine.items() if at >= step},
    )
