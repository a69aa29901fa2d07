"""What the tests of late saves share: a process of a launcher that saves, and a run for it."""

import json
import threading

from gptddp.checkpoint import late, snapshot

NAME = "step-000000000003.1"
GOES_ON = {"source": "memory", "step": 3}


def overdue(run_dir):
    """The run began an hour ago, and was never saved."""
    ledger = run_dir / "ledger.jsonl"
    events = [json.loads(line) for line in ledger.read_text().splitlines()]
    events[0]["time"] -= 3600
    ledger.write_text("".join(json.dumps(event) + "\n" for event in events))


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
