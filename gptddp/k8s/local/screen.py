"""The screen of a local job: events, progress, and on request the pods' logs."""

import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gptddp import live, units
from gptddp.errors import visible
from gptddp.k8s.observe.rank_0_log import (
    of_rank_0,
    progress,
    rows,
)
from gptddp.k8s.observe.world import NEVER, World, of_pods

_TAIL_BYTES = 16 << 10
_OF_STEP = ("step", "loss", "tok_s", "world_size", "time")
TERMINAL_EVERY_S, PLAIN_EVERY_S = 0.5, 10.0


class Progress:
    """The training's progress, from the log of rank 0's pod and the newest step of the run."""

    def __init__(self, logs: Sequence[Path], run_dir: str | None, per_pod: int = 1) -> None:
        """`logs`: the logs of all pods, as any may have rank 0; `per_pod`: ranks per pod."""
        self._logs, self._run_dir, self._per_pod = logs, run_dir, per_pod

    def parts(self, begun: Mapping[str, float], goes_on: bool = True) -> list[str]:
        """The most important first: `step 120/400`, `loss 3.2140`, `ETA 1 min 23 s`, `pods 4/4`...

        begun: start times of the pods, as for `world.of_pods`. goes_on: the job is not ending.
        """
        logs = [[(None, line) for line in end_of(log, _TAIL_BYTES)] for log in self._logs]
        found = progress(line for _, line in of_rank_0(logs))
        last = newest(Path(self._run_dir)) if self._run_dir else {}
        by_newest = last.get("world_size") or 0, last.get("time") or 0.0
        now = of_pods(begun, self._per_pod, *by_newest) if goes_on else World(0, is_stale=True)
        up = sum(it != NEVER for it in begun.values())
        pods, found["phase"] = f"pods {up}/{len(begun)}", found["phase"] if up else None
        done = (found["progress"] or {}) | last
        if not isinstance(done.get("step"), int):
            return [it for it in (found["phase"], pods) if it]
        parts = [it for it in (now.sentence, found["phase"]) if it]
        end = f"/{done['steps']}" if done.get("steps", 0) >= done["step"] else ""
        parts.append(f"step {done['step']}{end}")
        if (loss := done.get("loss")) is not None:
            parts.append(f"loss {units.loss(loss)}")
        is_present = not (now.is_stale or found["stall"])
        if is_present and done.get("left_s") is not None:
            parts.append(f"ETA {units.duration(done['left_s'])}")
        parts.append(pods)
        if is_present and done.get("tok_s") is not None:
            parts.append(f"{units.amount(done['tok_s'])} tok/s")
        parts += [f"{name} {text}" for name, text in rows(found | {"phase": ""}).items() if text]
        return list(map(visible, parts))


def newest(run: Path) -> dict[str, Any]:
    """Step, loss, speed, ranks and time in the last whole line of a run's log, if it has them.

    Reads the end of `log.<generation>.jsonl` of the highest generation. Every step has a line
    there; the readable lines of a pod's log are `log_every` steps apart.
    """
    names = ((path.name.split(".")[1], path) for path in run.glob("log.*.jsonl"))
    logs = {int(generation): path for generation, path in names if generation.isdigit()}
    for generation in sorted(logs, reverse=True):
        with contextlib.suppress(ValueError, IndexError, TypeError):
            entry = json.loads(end_of(logs[generation], 4096, whole=True)[-1])
            found = {key: entry[key] for key in _OF_STEP if key in entry}
            return {k: it for k, it in found.items() if it is None or isinstance(it, int | float)}
    return {}


def end_of(path: Path, nbytes: int, begin: int = 0, *, whole: bool = False) -> list[str]:
    """The lines in the last bytes of a file, from `begin` on; [] if it cannot be read.

    whole: without a last line that is not yet terminated.
    """
    with contextlib.suppress(OSError), open(path, "rb") as file:
        file.seek(max(begin, file.seek(0, os.SEEK_END) - nbytes))
        data = file.read()
        data = data[: data.rfind(b"\n") + 1] if whole else data
        return data.decode(errors="replace").splitlines()
    return []


class GrowingLog:
    """A pod's log; each read continues where the last read ended."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self._path, self._offset = path, offset

    def lines(self, *, rest: bool = False) -> list[str]:
        """The new whole lines; with `rest` also a last, unterminated line."""
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
        self._screen, self._out = live.Screen(), live.Patient(sys.stdout)
        self._shown: list[str] = []
        self._next = 0.0
        self._logs: dict[str, GrowingLog] = {}

    def event(self, text: str) -> None:
        """Print one line that stays."""
        self._screen.write(f"[{self.name}] {text}\n")

    def follow(self, prefix: str, log: Path) -> None:
        """Show the lines that a pod writes from now on."""
        self._logs[prefix] = GrowingLog(log, log.stat().st_size if log.exists() else 0)

    def logs(self, *, rest: bool = False) -> None:
        """Print new whole lines of the followed logs; with `rest` also a last, unterminated one."""
        for prefix, log in self._logs.items():
            if lines := log.lines(rest=rest):
                out = self._screen if self._screen.draws and self._out.draws else self._out
                out.write("".join(f"[{prefix}] {line}\n" for line in lines))

    def progress(self, parts: list[str], now: float) -> None:
        """Draw the progress line on a terminal; elsewhere print it when it changes."""
        self._next = now + (TERMINAL_EVERY_S if self._screen.draws else PLAIN_EVERY_S)
        if self._screen.draws:
            self._screen.show(parts)
        elif parts != self._shown:
            self._shown = parts
            self.event("  ".join(parts))

    def due(self, now: float) -> bool:
        """Is `progress` due?"""
        return now >= self._next

    def close(self) -> None:
        """Remove the progress line; the other lines stay."""
        self._screen.close()
