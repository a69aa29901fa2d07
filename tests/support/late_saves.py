"""What the tests of late saves share: a process of a launcher that saves, and a run for it."""

import threading

from support import ledgers

from gptddp.checkpoint import late, snapshot
from gptddp.run.history import Ledger, read_ledger

NAME = "step-000000000003.1"
GOES_ON = {"source": "memory", "step": 3}


def begin(run_dir, generation, **fields):
    """A later life of the run has begun."""
    first = read_ledger(run_dir)[0]
    about = {name: first[name] for name in ("run_id", "config")}
    Ledger(run_dir).event("start", generation, **about, **fields)


def overdue(run_dir):
    """The run began an hour ago, and was never saved."""
    start, *events = read_ledger(run_dir)
    ago = {name: start[name] - 3600 for name in ("time", "run_began")}
    ledgers.write(run_dir, [start | ago, *events])


class Saver(threading.Thread):
    """A launcher's process: it saves until the life has begun, then wants two newer states."""

    def __init__(self, pod, memory, run_dir):
        super().__init__(daemon=True)
        self.pod, self.path = pod, snapshot.path_of(memory, run_dir)
        self.began, self.ends = threading.Event(), threading.Event()
        self.got, self.left = None, None

    def run(self):
        with late.saving(self.pod) as note:
            note.write(NAME)
            self.began.set()
            assert self.ends.wait(60)
            self.got = all(late.newer_state(self.pod) for _ in range(2))
            self.left = snapshot.read(self.path)
