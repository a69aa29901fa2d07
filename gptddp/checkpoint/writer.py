"""Save in the background: training waits only for a copy of the tensors.

The copy is in memory shared with another process, which writes it (saver.py) and completes the save
even if this process dies. A thread here talks to that process. `benchmarks/checkpoint.py` measures
the cost of a save for the training.
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


class Writer:
    """Commits checkpoints through another process, one at a time. Rank 0 only.

    A disk failure is not raised in the caller: it is the `error` of the save's event.
    `parent`: the checkpoint that this life was restored from. `run_id` and `config`: of the run,
    for each of its checkpoints. `before_commit` runs in a thread when all is written but the name;
    an error from it prevents the commit. It syncs the run's log, so that the log has every
    committed step, and checks the lease. `left`: gives the saver the means to do both if this
    process dies: the `lease`, and the `lines` of the log and `events` of the ledger that are not
    durable; None: the saver then commits nothing. `keep`: see `retention.prune`; 0: nothing is
    deleted, not even on a full disk.
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
        self._saver = 0  # its process id; 0: it does not run
        self._channel: Channel  # to the saver
        self._thread: threading.Thread | None = None
        self._events: deque[dict[str, Any]] = deque()  # of the saves that have ended
        self._began = 0.0  # monotonic: start of the save in flight
        self._tried = ""  # the checkpoint of the last try
        self.failure: Exception | None = None  # of the last save

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def prepare(self, tensors: Mapping[str, Tensor]) -> Staging:
        """Allocate the memory for all saves, and start the saver, before the first save.

        Raises OSError; the first save then tries again.
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
        """Begin to save; False if the last save still runs, or saved this very step.

        `meta` is all state that is not a tensor, as JSON. The tensors (any device, stride and
        dtype) may change as soon as this returns. `known`: fields for its event in the ledger.
        `anew`: save even the state that this life was restored from.
        """
        if self.busy or (self.has(step) and not anew):
            return False
        self._began = time.monotonic()
        begin = time.perf_counter()
        try:
            staging = self.prepare(tensors)
            staging.fill(tensors)
        except OSError as error:  # not enough memory
            self._end(step, error, {})
            return True
        name = store.name_of(step, self.generation)
        request: dict[str, Any] = {
            "name": name,
            "known": dict(known or {}),
            "run_dir": str(self.run_dir.absolute()),
            "manifest": self._manifest(step, staging.layout, meta),
            "nbytes": staging.nbytes,
            "keep": self.keep,
            "keep_every": self.keep_every,
            "again": self._tried == name,
            "stall_s": time.perf_counter() - begin,
        }
        # A daemon, so that a hanging volume cannot delay the exit. The thread must not be inside
        # torch then: its C++ frames do not survive the end of the interpreter.
        self._thread = threading.Thread(
            target=self._write, args=(step, request), name="checkpoint", daemon=True
        )
        self._thread.start()
        return True

    def poll(self) -> dict[str, Any] | None:
        """The fields of the oldest save's event that was not returned yet, or None.

        `error` says why the checkpoint was not committed.
        """
        return self._events.popleft() if self._events else None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the save in flight; False if it still runs after `timeout_s`."""
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
        """Why the last save failed, or that one has run for over `patience_s`; else None."""
        waited_s = time.monotonic() - self._began
        if self.busy and waited_s > patience_s:
            return f"the save of a checkpoint has run for {waited_s:.0f} s"
        return _explain(self.failure) if self.failure else None

    def has(self, step: int) -> bool:
        """Is this step the last committed one, or the one that this life was restored from?"""
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
        about = {it: request[it] for it in ("name", "nbytes", "stall_s")}
        about["write_s"] = time.perf_counter() - begin
        self._end(step, failure, {**about, **request["known"]})

    def _end(self, step: int, failure: Exception | None, about: Mapping[str, Any]) -> None:
        self.failure = failure
        self._events.append({"step": step, **({"error": _explain(failure)} if failure else about)})

    def _save(self, request: dict[str, Any]) -> None:
        """Let the saver save. Raises the error that prevented it."""
        refusal: Exception | None = None
        with contextlib.suppress(OSError):  # the saver is gone: `receive` returns None
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
        """The error that forbids the checkpoint's name, or None."""
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
            for fd in numbers:
                os.set_inheritable(fd, True)
            env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
            # in another session, so that Ctrl-C in a terminal does not end it
            self._saver = os.posix_spawn(sys.executable, args, env, setsid=True)

    def _lost(self) -> OSError:
        """The error for a saver that is gone; the next save starts another."""
        pid, self._saver = self._saver, 0
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return OSError(f"the process that saves checkpoints (process {pid}) has {how}")


def _from_message(error: Mapping[str, Any]) -> Exception:
    """The inverse of `as_message` in the saver."""
    if "errno" in error:
        return OSError(error["errno"], error["strerror"], error["file"])
    return CheckpointError(error["text"])


def _explain(error: Exception) -> str:
    """One line for the log: the failure and, if known, the fix."""
    if isinstance(error, OSError):
        return explain(error)
    return str(error) if isinstance(error, GptddpError | Unusable) else repr(error)
