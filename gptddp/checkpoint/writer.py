"""Save in the background: a copy of the tensors is all that training waits for.

A thread, not a process: both need the copy, nearly all of a commit is in calls that release the
GIL, and a thread needs no shared memory and ends with its process. `benchmarks/checkpoint.py` says
what a save costs the training: 15 ms for 13 MB and 0.46 s for 1.5 GB, on two cores that both train.
"""

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from gptddp.checkpoint import retention, store
from gptddp.checkpoint.layout import Staging
from gptddp.distributed import environment
from gptddp.errors import GptddpError, Unusable
from gptddp.files import FULL, explain, fsync
from gptddp.run.directory import CHECKPOINTS

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

    def committed(self) -> dict[str, Any]:
        """What the ledger says of it, beside its fingerprints."""
        return {name: value for name, value in vars(self).items() if name != "error"}


class Writer:
    """Commits checkpoints from a background thread, one at a time. Rank 0 only.

    No failure of the disk reaches the caller as an exception: it is the `error` of the result.
    `parent` is the checkpoint that this life was restored from. `run_id` and `config`: of the run,
    which each of its checkpoints says. `before_commit` runs in the thread when all is written but
    the name; an OSError from it prevents the commit (the run's log is synced there, so that it has
    every step that is committed). `fence` runs after it, and raises Superseded where the run goes
    on without this process. `keep`: see `retention.prune`; 0: nothing is deleted on a full disk.
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
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.generation, self.run_id, self.config = generation, run_id, config
        self.parent = parent
        self.keep, self.keep_every = keep, keep_every
        self.read_back = True  # not where a grace period is running out
        self.wrote: Callable[[], None] = lambda: None  # called after each chunk
        self.before_commit, self.fence = before_commit, fence
        self._staging: Staging | None = None
        self._thread: threading.Thread | None = None
        self._results: deque[Saved] = deque()
        self._began = 0.0  # monotonic: the save in flight
        self._tried = ""  # the checkpoint of the last try
        self.failure: Exception | None = None  # of the last save

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def prepare(self, tensors: Mapping[str, Tensor]) -> Staging:
        """Allocate the buffer for what all saves have, before the first one has to."""
        if self._staging is None:
            self._staging = Staging(tensors)
        return self._staging

    def submit(self, step: int, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> bool:
        """Begin to save; False where the last save still runs or has saved this very step.

        `meta` is all state that is not a tensor, as JSON. The tensors (any device, stride and
        dtype) may change as soon as this returns.
        """
        if self.busy or self.has(step):
            return False
        self._began = time.monotonic()
        begin = time.perf_counter()
        staging = self.prepare(tensors)
        data = staging.fill(tensors)
        manifest = self._manifest(step, staging.layout, meta)
        stall_s = time.perf_counter() - begin
        # A daemon, so that a volume that hangs cannot hold up the exit; for that the thread may
        # not be inside torch, whose C++ frames do not survive the end of the interpreter.
        self._thread = threading.Thread(
            target=self._write, args=(manifest, data, stall_s), name="checkpoint", daemon=True
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

    def save_bytes(
        self, step: int, layout: Mapping[str, Any], data: memoryview, meta: Mapping[str, Any]
    ) -> Saved:
        """Save tensors that lie in memory as they will in the file, without a copy; waits."""
        self._write(self._manifest(step, layout, meta), data, 0.0)
        return self._results.pop()

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

    def _write(self, manifest: dict[str, Any], data: memoryview, stall_s: float) -> None:
        begin, failure = time.perf_counter(), None
        try:
            try:
                self._commit(manifest, data)
            except OSError as full:
                if full.errno not in FULL or not self.keep:
                    raise
                retention.discard_unfinished(self.run_dir, upto=self.generation)
                self._prune(min(self.keep, 2))
                self._commit(manifest, data)
        except Exception as exception:
            failure = exception
            if not isinstance(exception, OSError | GptddpError | Unusable):
                log.error("checkpoint writer: unexpected error", exc_info=exception)
        self.failure, error = failure, _explain(failure) if failure else None
        name = store.name_of(manifest["step"], manifest["generation"])
        write_s = time.perf_counter() - begin
        self._results.append(Saved(manifest["step"], name, len(data), stall_s, write_s, error))

    def _commit(self, manifest: dict[str, Any], data: memoryview) -> None:
        name = store.name_of(manifest["step"], self.generation)
        path = self.run_dir / CHECKPOINTS / name
        again, self._tried = self._tried == name, name

        def before_rename() -> None:
            self.before_commit()
            self.fence()
            if store.is_foreign(path, self.run_id):
                log.warning("checkpoint %s is another run's: it is set aside", name)
                retention.set_aside(path)

        try:
            store.commit(self.run_dir, manifest, data, before_rename, self.read_back, self.wrote)
        except FileExistsError:
            if not again:
                raise
            # The last try has come as far as the name, and failed by what comes after it.
            fsync(path.parent)
        store.read_manifest(path)
        self.parent = name
        if self.read_back:
            try:
                self._prune(self.keep)
            except OSError as error:  # the checkpoint stands
                log.warning("after the commit of %s: %s", name, explain(error))

    def _prune(self, keep: int) -> None:
        retention.prune(self.run_dir, keep, keep_every=self.keep_every, run_id=self.run_id)


def _explain(error: Exception) -> str:
    """One line for the log: what failed and, where we know it, the fix."""
    if isinstance(error, OSError):
        return explain(error)
    return str(error) if isinstance(error, GptddpError | Unusable) else repr(error)
