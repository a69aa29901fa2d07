"""The process that commits checkpoints. If rank 0 dies during a save, the saver finishes it.

Rank 0 (writer.py) stages a state in memory that both share, and requests the save. The saver writes
the files, and asks rank 0 before they get their name: rank 0 syncs the log, and checks that it
still holds the run. If rank 0 is dead by then, the saver does both in its place, with the data in
the request: it adds the missing lines and events to log and ledger, and holds the lease until it is
done. Then it ends.

It imports no torch: it takes 17 MB, and 0.15 s of one core to start, once per life.
"""

import json
import logging
import mmap
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gptddp.checkpoint import retention, store
from gptddp.distributed.report import VisibleFormatter
from gptddp.errors import GptddpError, Superseded, Unusable
from gptddp.files import FULL, explain, fsync
from gptddp.run.directory import CHECKPOINTS, LEASE, LEDGER, log_path
from gptddp.run.history import Ledger, RunLog, complete, recover
from gptddp.run.lease import Lease, inherit

ALONE_S = 3600.0  # limit without rank 0: a hanging volume could block it forever

log = logging.getLogger(__name__)


class Channel:
    """Messages (JSON objects) to and from the process at the other end."""

    def __init__(self, fd: int) -> None:
        """`fd`: of a socket, which is closed with this object."""
        self._end = Connection(fd)

    def send(self, **message: Any) -> None:
        """Send a message. Raises OSError if the other process is gone."""
        self._end.send_bytes(json.dumps(message).encode())

    def receive(self) -> dict[str, Any] | None:
        """The next message; None if the other process is gone, even in the middle of a message."""
        with suppress(EOFError, OSError):  # OSError: it did not read our last messages
            message: dict[str, Any] = json.loads(self._end.recv_bytes())
            return message
        return None


# -- a save --------------------------------------------------------------------------------------


def save(
    request: dict[str, Any],
    data: memoryview,
    before_rename: Callable[[], None],
) -> None:
    """Commit a checkpoint, and prune older ones. On a full disk, prune and commit again.

    `request`: see `Writer`. `before_rename`: see `store.commit`. Raises OSError, Unusable, and the
    exceptions of `before_rename`.
    """
    run, keep = Path(request["run_dir"]), request["keep"]
    prune = partial(
        retention.prune,
        run,
        keep_every=request["keep_every"],
        run_id=request["manifest"]["run_id"],
    )
    try:
        _commit(run, request, data, before_rename)
    except OSError as full:
        if full.errno not in FULL or not keep:
            raise
        retention.discard_unfinished(run, upto=request["manifest"]["generation"])
        prune(min(keep, 2))
        _commit(run, {**request, "again": True}, data, before_rename)
    if keep:
        try:
            prune(keep)
        except OSError as error:  # the checkpoint is committed
            log.warning("%s is saved, but older ones stay: %s", request["name"], explain(error))


def _commit(
    run: Path,
    request: Mapping[str, Any],
    data: memoryview,
    before_rename: Callable[[], None],
) -> None:
    manifest, name = request["manifest"], request["name"]
    path = run / CHECKPOINTS / name

    def last_look() -> None:
        before_rename()
        if store.is_foreign(path, manifest["run_id"]):
            log.warning("checkpoint %s belongs to another run: it is set aside", name)
            retention.set_aside(path)

    try:
        store.commit(run, manifest, data, last_look)
    except FileExistsError:
        if not request["again"]:
            raise
        # The last try gave the checkpoint its name, and failed afterwards.
        fsync(path.parent)
    store.read_manifest(path)


# -- the process ---------------------------------------------------------------------------------


class Saver:
    """Executes the requests of rank 0, one save at a time; see above."""

    def __init__(self, channel: Channel, memory: memoryview) -> None:
        self._channel, self._memory = channel, memory
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._request: dict[str, Any] | None = None  # the save in progress
        self._lease: Lease | None = None  # in place of rank 0
        self._why = "the training process has ended"  # why it has no lease
        threading.Thread(target=self._listen, name="listen", daemon=True).start()

    def run(self) -> None:
        """Save until rank 0 is gone and the save that it began is over."""
        while (request := self._answers.get()) is not None:
            error, begin = None, time.perf_counter()
            try:
                data = self._memory[: request["nbytes"]]
                save(request, data, self._ask)
            except Exception as exception:
                error = exception
                if not isinstance(exception, OSError | GptddpError | Unusable):
                    log.error("saver: unexpected error", exc_info=exception)
            if not self._tell(end=None if error is None else as_message(error)):
                self._say_alone(request, error, time.perf_counter() - begin)
            self._request = None
        if self._lease:
            self._lease.release()

    def _listen(self) -> None:
        """Receive from rank 0 until it is gone. In a thread: the disk may block the main one."""
        while (message := self._channel.receive()) is not None:
            if "manifest" in message:
                self._request = message
            self._answers.put(message)
        if request := self._request:
            signal.alarm(int(ALONE_S))
            try:
                if left := request["left"]:
                    self._lease = inherit(Path(request["run_dir"], LEASE), left["lease"])
            except (OSError, Superseded) as error:
                self._why = str(error)
        self._answers.put(None)

    def _tell(self, **message: Any) -> bool:
        """Send to rank 0; False if it is gone."""
        with suppress(OSError):
            self._channel.send(**message)
            return True
        return False

    def _ask(self) -> None:
        """Ask rank 0 when all is durable but the name; raise the error that forbids the name."""
        self._tell(ready=True)
        answer = self._answers.get()
        if answer is None:
            self._answers.put(None)  # for `run`, or another try
            assert self._request
            self._look_alone(self._request)
        elif code := answer["errno"]:
            raise OSError(code, os.strerror(code))
        elif answer["forbids"]:
            raise GptddpError(answer["forbids"])

    def _look_alone(self, request: dict[str, Any]) -> None:
        """In place of rank 0: complete log and ledger, and check that we still hold the run."""
        if self._lease is None:
            raise Superseded(self._why)
        self._lease.check()
        run, step = Path(request["run_dir"]), request["manifest"]["step"]
        generation, left = request["manifest"]["generation"], request["left"]
        with closing(Ledger(run)) as ledger, closing(RunLog(run, generation, ledger)) as lines:
            recover(run, ledger, left["events"])
            complete(run, lines, left["lines"], step)
            lines.sync()  # and the ledger before it
        for path in filter(Path.exists, (run / LEDGER, log_path(run, generation))):
            fsync(path)  # the lines that rank 0 wrote but did not sync
        self._lease.check()

    def _say_alone(self, request: dict[str, Any], error: Exception | None, took_s: float) -> None:
        """In place of rank 0: report the result of its save, in the ledger or as a warning."""
        step, name = request["manifest"]["step"], request["name"]
        if error:
            log.warning("the state of step %d is not saved: %s", step, error)
            return
        log.warning("checkpoint %s is saved, after the end of its rank 0", name)
        about = {"step": step, "name": name, "nbytes": request["nbytes"], **request["known"]}
        about |= {"stall_s": request["stall_s"], "write_s": took_s}
        with closing(Ledger(request["run_dir"])) as ledger:
            ledger.event("checkpoint", request["manifest"]["generation"], **about)


def as_message(error: Exception) -> dict[str, Any]:
    """The message from which the writer builds the same error."""
    if isinstance(error, OSError):
        return {"errno": error.errno, "strerror": error.strerror, "file": error.filename}
    return {"text": str(error) if isinstance(error, GptddpError | Unusable) else repr(error)}


def main() -> None:
    """Arguments: the descriptors of the channel and of the memory, and the memory's bytes."""
    end, fd, nbytes = map(int, sys.argv[1:])
    channel = Channel(end)
    handler = logging.StreamHandler()  # rank 0's stderr
    handler.setFormatter(VisibleFormatter())
    logging.basicConfig(handlers=[handler])
    with mmap.mmap(fd, nbytes, access=mmap.ACCESS_READ) as memory:
        Saver(channel, memoryview(memory)).run()
        sys.stderr.flush()
        os._exit(0)  # the mapping is in use, and the disk may block a thread
