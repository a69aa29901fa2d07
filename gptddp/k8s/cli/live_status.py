"""The live screen of `status --watch`, and its stream of JSON."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

from gptddp.k8s import exit_codes
from gptddp.k8s.cli.command import note
from gptddp.k8s.cluster import Cluster
from gptddp.k8s.observe import frame, rank_0_log, status, why
from gptddp.k8s.observe.watcher import of_job

_RESIZE_S = 0.1  # between two looks at the size of the terminal
_BEGIN, _END = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # another screen, no cursor; and back
_HOME, _REST_OF_LINE, _REST = "\x1b[H", "\x1b[K", "\x1b[J"
_CODES = {why.SUCCEEDED: exit_codes.SUCCEEDED, why.FAILED: exit_codes.FAILED}


def watch(cluster: Cluster, name: str, every_s: float) -> int:
    """Show a job until it ends; its exit code, as of `wait`. Raises NotFoundError, ClusterError.

    Where stdout is no terminal it is shown once.
    """
    live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    view = _View(cluster, name, live)
    if not view.look():
        raise cluster.not_found(name)
    if not live:
        view.leave()
        note("stdout is no live terminal, so this was one look: -o json goes on with a line a look")
        return exit_codes.SUCCEEDED
    there = True
    try:
        with _screen():
            while there and view.state not in why.FINAL:
                view.draw()
                view.wait(every_s)
                there = view.look()
    except KeyboardInterrupt:
        view.leave()
        raise
    view.leave()
    return _CODES[view.state] if there else exit_codes.GONE


def stream(cluster: Cluster, name: str, every_s: float) -> int:
    """Print what `status -o json` does, an object a line, at each look until the job has ended."""
    watcher = of_job(cluster, name, note)
    if (found := watcher.poll()) is None:
        raise cluster.not_found(name)
    while found:
        shown = status.describe(rank_0_log.with_log(cluster, found))
        _write(json.dumps(shown) + "\n")
        if shown["state"] in _CODES:
            return _CODES[shown["state"]]
        time.sleep(every_s)
        found = watcher.poll()
    return exit_codes.GONE


class _View:
    """What is known of the job, and the terminal that shows it."""

    def __init__(self, cluster: Cluster, name: str, live: bool) -> None:
        self.state = ""
        self._cluster, self._live, self._note = cluster, live, ""
        self._watcher = of_job(cluster, name, self._say)
        self._losses = rank_0_log.Losses()
        self._history: list[float] = []
        self._drawn = shutil.get_terminal_size()

    def look(self) -> bool:
        """Ask the cluster once more, and wait for one that is away; False: there is no such job."""
        if (found := self._watcher.poll()) is None:
            return False
        found = rank_0_log.with_log(self._cluster, found)
        logged = rank_0_log.progress(line for _, line in found.log or ())
        self._history = self._losses.add(logged["losses"])
        self._note, self._shown = "", status.describe(found)
        self.state = self._shown["state"]
        return True

    def _say(self, text: str) -> None:
        """That the API server does not answer: what is shown is old."""
        self._note = text
        if self._live and self.state:
            self.draw()

    def _lines(self, width: int, height: int = 0) -> list[str]:
        """`width`: 0 where nothing is cut."""
        return frame.frame(
            self._shown,
            self._history,
            width=width or 1000,
            height=height,
            colours=bool(width) and not os.environ.get("NO_COLOR"),
            unicode=rank_0_log.has_blocks(sys.stdout),
            note=self._note,
        )

    def draw(self) -> None:
        """Fill the screen, whatever its size is now."""
        size = self._drawn = shutil.get_terminal_size()
        lines = self._lines(max(1, size.columns), max(1, size.lines - 1))
        _write(_HOME + "".join(f"{line}{_REST_OF_LINE}\n" for line in lines) + _REST)

    def leave(self) -> None:
        """What was seen last stays on the terminal."""
        _write("\n".join(self._lines(0)) + "\n")

    def wait(self, seconds: float) -> None:
        """Until the next look is due; a terminal of another size is drawn at once."""
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            time.sleep(min(_RESIZE_S, left_s))
            if self._drawn != shutil.get_terminal_size():
                self.draw()


@contextlib.contextmanager
def _screen() -> Iterator[None]:
    """The terminal's other screen; the own one is back however this ends."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    old = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    _write(_BEGIN)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the terminal is gone
            _write(_END)
        for number, handler in old.items():
            signal.signal(number, handler)


def _write(text: str) -> None:
    encoding = sys.stdout.encoding or "ascii"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
