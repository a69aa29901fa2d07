"""What the user of a local job sees: events, one progress line, the pods' logs on request."""

import contextlib
import json
import os
import shutil
import sys
from collections import deque
from pathlib import Path
from typing import IO, Any

from gptddp import budget
from gptddp.config import Config
from gptddp.errors import visible
from gptddp.k8s.observe.progress import Losses, has_blocks, progress, rows, sparkline

_TAIL_BYTES = 16 << 10
_SPARK = 16  # characters
TERMINAL_EVERY_S, PLAIN_EVERY_S = 0.5, 10.0


class StepFeed:
    """The newest step of a run directory, and when the run will be done."""

    def __init__(self, run: Path, config: Config | None) -> None:
        """`config`: the run's, for its budgets; None where that cannot be told."""
        self.run, self.config = run, config
        self._step: int | None = None
        self._losses = Losses()
        self._recent: deque[tuple[float, int]] = deque(maxlen=60)  # (when it came, step)

    def newest(self) -> dict[str, Any]:
        """The last whole line of `log.<generation>.jsonl` of the highest generation."""
        names = ((p.name.split(".")[1], p) for p in self.run.glob("log.*.jsonl"))
        logs = {int(generation): p for generation, p in names if generation.isdigit()}
        for generation in sorted(logs, reverse=True):
            with contextlib.suppress(OSError, ValueError, IndexError):
                with open(logs[generation], "rb") as file:
                    file.seek(max(0, file.seek(0, 2) - 4096))
                    entry = json.loads(file.read().rsplit(b"\n", 2)[-2])
                if isinstance(entry, dict):
                    return entry
        return {}

    def line(self, now: float, spark: int = 0) -> str:
        """`step 120/400  loss 3.214  45.2k tok/s  ETA 1:23`; empty before the first step.

        spark: so many characters show the losses so far.
        """
        entry = self.newest()
        step = entry.get("step")
        if not isinstance(step, int):
            return ""
        if self._step is not None and step < self._step:
            self._recent.clear()  # some steps are done again
        elif self._step is not None and step > self._step:
            self._recent.append((now, step))
        self._step = step
        done = (step, _number(entry.get("tokens")), _number(entry.get("train_s")))
        known = self.config is not None and step <= self.config.steps
        parts = [f"step {budget.shown(self.config, *done) if self.config and known else step}"]
        for key, form in (("loss", "loss {:.3f}"), ("tok_s", "{:,.0f} tok/s")):
            if isinstance(entry.get(key), int | float):
                parts.append(form.format(entry[key]))
        if isinstance(loss := entry.get("loss"), int | float):
            losses = self._losses.add({step: loss})
            if spark and len(losses) > 1:
                parts.insert(2, sparkline(losses, spark))
        if (eta_s := self._eta_s(*done)) is not None:
            parts.append(f"ETA {duration(eta_s)}")
        return "  ".join(parts)

    def _eta_s(self, step: int, tokens: int, train_s: float) -> float | None:
        if self.config is None or len(self._recent) < 2:
            return None
        (t0, first), (t1, last) = self._recent[0], self._recent[-1]
        end = budget.last_step(self.config, step, tokens, train_s)
        return max(0.0, end - step) * (t1 - t0) / (last - first)


def _number(value: Any) -> Any:
    """A number of the log; 0 for what is none, as in a line without it, or in a foreign one."""
    return value if isinstance(value, int | float) and 0 <= value < 2**63 else 0


def told(log: Path) -> str:
    """What rank 0 has told in its pod's log beside its steps: goodput, who is slow, a stall."""
    with contextlib.suppress(OSError), open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        found = rows(progress(file.read().decode(errors="replace").splitlines()))
        parts = [f"{name} {text}" for name, text in found.items() if text]
        return visible("".join(f"  {part}" for part in parts))
    return ""


def duration(seconds: float) -> str:
    """`1:05` or `1:02:03`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def relative_path(path: str | Path) -> str:
    """A path as the user would type it: relative where it is below the current directory."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


class Screen:
    """Events and progress on stderr, the pods' lines on stdout. A closed output is no error."""

    def __init__(self, name: str, out: IO[str] | None = None, err: IO[str] | None = None) -> None:
        self.name = name
        self.out, self.err = out or sys.stdout, err or sys.stderr
        self.terminal = self.err.isatty()
        self.spark = _SPARK if self.terminal and has_blocks(self.err) else 0
        self._line = ""
        self._next = 0.0
        self._tails: dict[str, tuple[Path, int]] = {}

    def event(self, text: str) -> None:
        """One line that stays."""
        self._clear()
        self._write(self.err, f"[{self.name}] {text}\n")
        self._draw()

    def follow(self, prefix: str, log: Path) -> None:
        """Show what a pod writes from now on."""
        with contextlib.suppress(OSError):
            self._tails[prefix] = (log, log.stat().st_size if log.exists() else 0)

    def logs(self, *, rest: bool = False) -> None:
        """Print the new whole lines of the followed logs; with `rest` also a last, open one."""
        for prefix, (log, offset) in self._tails.items():
            try:
                with open(log, "rb") as file:
                    file.seek(offset)
                    data = file.read(2**20)
            except OSError:
                continue
            whole = data if rest or len(data) == 2**20 else data[: data.rfind(b"\n") + 1]
            if whole:
                self._tails[prefix] = (log, offset + len(whole))
                self._clear()
                lines = whole.decode(errors="replace").splitlines()
                self._write(self.out, "".join(f"[{prefix}] {line}\n" for line in lines))
                self._draw()

    def progress(self, text: str, now: float, *, force: bool = False) -> None:
        """The line that is replaced on a terminal, and written every ten seconds elsewhere."""
        if not force and now < self._next:
            return
        self._next = now + (TERMINAL_EVERY_S if self.terminal else PLAIN_EVERY_S)
        if self.terminal:
            self._clear()
            self._line = text
            self._draw()
        elif text != self._line:
            self._line = text
            self._write(self.err, f"[{self.name}] {text}\n")

    def due(self, now: float) -> bool:
        """Is it time for `progress`?"""
        return now >= self._next

    def close(self) -> None:
        """Leave the cursor at the start of a line."""
        self._clear()
        self._line = ""

    def _clear(self) -> None:
        if self.terminal and self._line:
            self._write(self.err, "\r\x1b[K")

    def _draw(self) -> None:
        if self.terminal and self._line:
            width = shutil.get_terminal_size().columns - 1
            self._write(self.err, self._line[:width])

    @staticmethod
    def _write(stream: IO[str], text: str) -> None:
        try:
            stream.write(text)
            stream.flush()
        except (OSError, ValueError):  # the reader is gone; the job goes on, and so does exit
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "w") as null:
                os.dup2(null.fileno(), stream.fileno())
