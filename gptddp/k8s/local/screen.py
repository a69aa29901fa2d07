"""What the user of a local job sees: events, one progress line, the pods' logs on request."""

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from gptddp import units
from gptddp.errors import visible
from gptddp.k8s.observe.rank_0_log import (
    Losses,
    has_blocks,
    of_rank_0,
    progress,
    rows,
    sparkline,
)

_TAIL_BYTES = 16 << 10
_SPARK = 16  # characters
TERMINAL_EVERY_S, PLAIN_EVERY_S = 0.5, 10.0


class Progress:
    """How far the training is, by the log of rank 0's pod and the newest step of the run."""

    def __init__(self, logs: Sequence[Path], run_dir: str | None) -> None:
        """`logs`: of all pods, as any may have rank 0."""
        self._logs, self._run_dir = logs, run_dir
        self._losses = Losses()

    def line(self, pods: str, spark: int = 0) -> str:
        """`step 120/400  loss 3.2140  45.2 k tok/s  ETA 1 min 23 s  pods 4/4`; `pods` before the
        first step.

        spark: so many characters show the losses so far.
        """
        logs = [[(None, line) for line in end_of(log, _TAIL_BYTES)] for log in self._logs]
        found = progress(line for _, line in of_rank_0(logs))
        done = (found["progress"] or {}) | (newest(Path(self._run_dir)) if self._run_dir else {})
        if not isinstance(done.get("step"), int):
            return pods
        end = f"/{done['steps']}" if done.get("steps", 0) >= done["step"] else ""
        parts = [f"step {done['step']}{end}"]
        if (loss := done.get("loss")) is not None:
            parts.append(f"loss {units.loss(loss)}")
            losses = self._losses.add({done["step"]: loss})
            if spark and len(losses) > 1:
                parts.append(sparkline(losses, spark))
        if done.get("tok_s") is not None:
            parts.append(f"{units.amount(done['tok_s'])} tok/s")
        if done.get("left_s") is not None:
            parts.append(f"ETA {units.duration(done['left_s'])}")
        per_pod = [f"{name} {text}" for name, text in rows(found).items() if text]
        return visible("  ".join([*parts, pods, *per_pod]))


def newest(run: Path) -> dict[str, Any]:
    """Step, loss and speed of the last whole line of a run's log, where it has them.

    That is the end of `log.<generation>.jsonl` of the highest generation. Every step has a line
    there; the readable lines of a pod's log are `log_every` steps apart.
    """
    names = ((path.name.split(".")[1], path) for path in run.glob("log.*.jsonl"))
    logs = {int(generation): path for generation, path in names if generation.isdigit()}
    for generation in sorted(logs, reverse=True):
        with contextlib.suppress(ValueError, IndexError, TypeError):
            entry = json.loads(end_of(logs[generation], 4096, whole=True)[-1])
            found = {key: entry[key] for key in ("step", "loss", "tok_s") if key in entry}
            return {k: it for k, it in found.items() if it is None or isinstance(it, int | float)}
    return {}


def end_of(path: Path, nbytes: int, begin: int = 0, *, whole: bool = False) -> list[str]:
    """The lines in the last bytes of a file, from `begin` on; none where it cannot be read.

    whole: without a last one that has no end yet.
    """
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(begin, file.seek(0, os.SEEK_END) - nbytes))
        data = file.read()
        data = data[: data.rfind(b"\n") + 1] if whole else data
        return data.decode(errors="replace").splitlines()
    return []


class GrowingLog:
    """A pod's log, read on from where the last read has ended."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path, self._offset = path, offset

    def lines(self, *, rest: bool = False) -> list[str]:
        """The new whole lines; with `rest` also a last, open one."""
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            file.seek(self._offset)
            data = file.read()
            data = data if rest else data[: data.rfind(b"\n") + 1]
            self._offset += len(data)
            return data.decode(errors="replace").splitlines()
        return []


class Screen:
    """Events and progress on stderr, the pods' lines on stdout. A closed output is no error."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.out, self.err = sys.stdout, sys.stderr
        self.terminal = self.err.isatty()
        self.spark = _SPARK if self.terminal and has_blocks(self.err) else 0
        self._line = ""
        self._next = 0.0
        self._logs: dict[str, GrowingLog] = {}

    def event(self, text: str) -> None:
        """One line that stays."""
        self._clear()
        self._write(self.err, f"[{self.name}] {text}\n")
        self._draw()

    def follow(self, prefix: str, log: Path) -> None:
        """Show what a pod writes from now on."""
        self._logs[prefix] = GrowingLog(log, log.stat().st_size if log.exists() else 0)

    def logs(self, *, rest: bool = False) -> None:
        """Print the new whole lines of the followed logs; with `rest` also a last, open one."""
        for prefix, log in self._logs.items():
            if lines := log.lines(rest=rest):
                self._clear()
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
