"""A run under on_bad=quarantine: the loaders of all ranks in one process."""

import contextlib
import json
import types

import torch
from support.loaders import global_batch, open_loader

from gptddp.run.progress import Progress
from gptddp.run.summary import decided
from gptddp.training import quarantine


class Run:
    """A run of the loaders of all ranks in this process, with its ledger of decisions."""

    def __init__(self, dataset, **changes):
        self.dataset, self.changes = dataset, changes
        self.progress = Progress()
        self.fps, self.ledger = [], []

    def go(self, world_size, until):
        """Do one life, from the state that the last one left."""
        again = decided(self.ledger, self.progress.step)
        while self.progress.step < until:
            with contextlib.ExitStack() as stack:
                loaders = [
                    stack.enter_context(
                        open_loader(
                            self.dataset,
                            rank=r,
                            world_size=world_size,
                            state=self.progress.data or None,
                            **self.changes,
                        )
                    )
                    for r in range(world_size)
                ]
                while self.progress.step < until and self.step(loaders, again):
                    pass
        return self

    def step(self, loaders, again) -> bool:
        """Do one step; False if a decision was taken instead."""
        due = again.get(self.progress.step, ())
        batches = [quarantine.next_batch(loader, "quarantine", due) for loader in loaders]
        found = torch.tensor([batch.bad + 1 for batch in batches])
        if not found.any():
            ready = [types.SimpleNamespace(next=lambda b=batch: b) for batch in batches]
            batch = global_batch(ready)
            self.fps.append(batch.fp)
            self.progress.step += 1
            self.progress.data = json.loads(json.dumps(loaders[0].state(batch.cursors)))
            return True
        world = types.SimpleNamespace(
            rank=0, world_size=len(loaders), all_reduce=lambda table: table + found - own
        )
        own = torch.zeros_like(found)
        own[0] = found[0]
        decision = quarantine.decide(batches[0], loaders[0], self.progress, world)
        event = {"event": "quarantine", "step": self.progress.step, **decision}
        self.ledger.append(event)
        return False
