"""Save in the background: a copy of the tensors is all that training waits for.

The copy lies in memory that another process shares, which writes it (saver.py): so a save that has
begun is ended, whatever becomes of this process. A thread here talks with it.
`benchmarks/checkpoint.py` says what a save costs the training.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from gptddp.checkpoint import store
from gptddp.checkpoint.layout import Staging
from gptddp.checkpoint.saver import Channel
from gptddp.distributed import environment
from gptddp.errors import CheckpointError, GptddpError, Unusable
from gptddp.files import explain

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saved:
    """The end of one save; `error` is None when the checkpoint is committed."""

    step: int
    name: str
    nbytes: int
    stall_s: float  # taken from training
    write_s: float  # in the background
    error: str | None
    known: Mapping[str, Any] = field(default_factory=dict)  # as given to `submit`

    def committed(self) -> dict[str, Any]:
        """What the ledger says of it."""
        names = ("step", "name", "nbytes", "stall_s", "write_s")
        return {name: getattr(self, name) for name in names} | dict(self.known)


class Writer:
    """Has checkpoints committed by a process of its own, one at a time. Rank 0 only.

    No failure of the disk reaches the caller as an exception: it is the `error` of the result.
    `parent` is the checkpoint that this life was restored from. `run_id` and `config`: of the run,
    which each of its checkpoints says. `before_commit` runs in a thread when all is written but
    the name; an error from it prevents the commit: the run's log is synced there, so that it has
    every step that is committed, and the lease is looked at. `left`: what the saver needs to do
    both where this process is gone: the `lease`, and of `lines` of the log and `events` of the
    ledger those that are not durable; None: then nothing is committed. `keep`: see
    `retention.prune`; 0: nothing is deleted on a full disk.
    """

    def __init__(
        self,
        run_dir: str | Path,
        generation: int,
        *,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        parent: str | None = None,
        keep: int = 3,
        keep_every: int = 0,
        before_commit: Callable[[], None] = lambda: None,
        left: Callable[[], Mapping[str, Any] | None] = lambda: None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.generation, self.run_id, self.config = generation, run_id, config
        self.parent = parent
        self.keep, self.keep_every = keep, keep_every
        self.before_commit, self._left = before_commit, left
        self._staging: Staging | None = None
        self._saver = 0  # its process id; 0: there is none
        self._channel: Channel  # to it
        self._thread: threading.Thread | None = None
        self._results: deque[Saved] = deque()
        self._began = 0.0  # monotonic: the save in flight
        self._tried = ""  # the checkpoint of the last try
        self.failure: Exception | None = None  # of the last save

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def prepare(self, tensors: Mapping[str, Tensor]) -> Staging:
        """Allocate memory for what all saves have, and start the saver, before the first save.

        Raises OSError; the first save tries it again.
        """
        if self._staging is None:
            self._staging = Staging(tensors)
        if not self._saver:
            self._start(self._staging)
        return self._staging

    def submit(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        known: Mapping[str, Any] | None = None,
        anew: bool = False,
    ) -> bool:
        """Begin to save; False where the last save still runs or has saved this very step.

        `meta` is all state that is not a tensor, as JSON. The tensors (any device, stride and
        dtype) may change as soon as this returns. `known`: what the ledger is to have of it.
        `anew`: also where it is the state that this life was restored from.
        """
        if self.busy or (self.has(step) and not anew):
            return False
        self._began = time.monotonic()
        begin = time.perf_counter()
        request: dict[str, Any] = {
            "name": store.name_of(step, self.generation),
            "known": dict(known or {}),
        }
        try:
            staging = self.prepare(tensors)
            staging.fill(tensors)
        except OSError as error:  # no memory for it
            self._end(step, request, 0.0, error)
            return True
        request |= {
            "run_dir": str(self.run_dir.absolute()),
            "manifest": self._manifest(step, staging.layout, meta),
            "nbytes": staging.nbytes,
            "keep": self.keep,
            "keep_every": self.keep_every,
            "again": self._tried == request["name"],
            "stall_s": time.perf_counter() - begin,
        }
        # A daemon, so that a volume that hangs cannot hold up the exit; for that the thread may
        # not be inside torch, whose C++ frames do not survive the end of the interpreter.
        self._thread = threading.Thread(
            target=self._write, args=(step, request), name="checkpoint", daemon=True
        )
        self._thread.start()
        return True

    def poll(self) -> Saved | None:
        """The oldest result that was not handed out yet; None where there is none."""
        return self._results.popleft() if self._results else None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the save in flight; False where it still runs after `timeout_s`."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.busy

    def _manifest(
        self, step: int, layout: Mapping[str, Any], meta: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {
            "step": step,
            "generation": self.generation,
            "run_id": self.run_id,
            **({"config": dict(self.config)} if self.config is not None else {}),
            "parent": self.parent,
            "time": time.time(),
            **({"code": code} if (code := environment.code()) else {}),
            "tensors": layout,
            "meta": json.loads(json.dumps(meta)),
        }

    def trouble(self, patience_s: float) -> str | None:
        """Why the last save has failed, or that one is in flight for so long."""
        waited_s = time.monotonic() - self._began
        if self.busy and waited_s > patience_s:
            return f"a checkpoint has been in the writing for {waited_s:.0f} s"
        return _explain(self.failure) if self.failure else None

    def has(self, step: int) -> bool:
        """Is this step the one last committed, or the one that this life was restored from."""
        return self.parent is not None and store.order(self.parent)[1] == step

    # -- in the thread

    def _write(self, step: int, request: dict[str, Any]) -> None:
        begin, failure = time.perf_counter(), None
        self._tried = request["name"]
        try:
            self._save({**request, "left": self._left()})
            self.parent = request["name"]
        except Exception as exception:
            failure = exception
            if not isinstance(exception, OSError | GptddpError | Unusable):
                log.error("checkpoint writer: unexpected error", exc_info=exception)
        self._end(step, request, time.perf_counter() - begin, failure)

    def _end(
        self, step: int, request: dict[str, Any], write_s: float, failure: Exception | None
    ) -> None:
        self.failure, error = failure, _explain(failure) if failure else None
        about = request["name"], request.get("nbytes", 0), request.get("stall_s", 0.0)
        self._results.append(Saved(step, *about, write_s, error, request["known"]))

    def _save(self, request: dict[str, Any]) -> None:
        """Have the saver do it. Raises what has kept it from that."""
        assert self._staging
        if not self._saver:
            self._start(self._staging)
        refusal: Exception | None = None
        with contextlib.suppress(OSError):  # it is gone, as what it says then shows
            self._channel.send(**request)
        while (said := self._channel.receive()) is not None:
            if "ready" in said:
                refusal = self._refusal()
                code = refusal.errno if isinstance(refusal, OSError) else 0
                with contextlib.suppress(OSError):
                    self._channel.send(errno=code, forbids=str(refusal or ""))
            elif error := said["end"]:
                raise refusal or _from_message(error)
            else:
                return
        raise self._lost()

    def _refusal(self) -> Exception | None:
        """What forbids to give the checkpoint its name."""
        try:
            self.before_commit()
        except Exception as exception:
            return exception
        return None

    def _start(self, staging: Staging) -> None:
        """Start the saver. No `fork`: this process may have all of the node's memory."""
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours.detach())
        code = "from gptddp.checkpoint.saver import main; main()"
        with theirs:
            numbers = theirs.fileno(), staging.fd
            args = [sys.executable, "-P", "-c", code, *map(str, numbers), str(staging.size)]
            try:
                for fd in numbers:
                    os.set_inheritable(fd, True)
                # its own session: no Ctrl-C of a terminal ends it
                env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
                self._saver = os.posix_spawn(sys.executable, args, env, setsid=True)
            finally:
                os.set_inheritable(staging.fd, False)

    def _lost(self) -> OSError:
        """The saver is gone: the next save starts another."""
        pid, self._saver = self._saver, 0
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return OSError(f"the process that saves checkpoints (process {pid}) has {how}")


def _from_message(error: Mapping[str, Any]) -> Exception:
    """What the saver has made a message of (`as_message`)."""
    if "errno" in error:
        return OSError(error["errno"], error["strerror"], error["file"])
    return CheckpointError(error["text"])


def _explain(error: Exception) -> str:
    """One line for the log: what failed and, where we know it, the fix."""
    if isinstance(error, OSError):
        return explain(error)
    return str(error) if isinstance(error, GptddpError | Unusable) else repr(error)
