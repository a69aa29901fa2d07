"""What all ranks agree on before a step."""

from dataclasses import dataclass

import numpy as np
import torch

from gptddp.data.loader import Batch
from gptddp.distributed.connect import World

_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Agreed:
    """The sum over all ranks of what each brought to the step."""

    targets: int  # valid targets of the whole step, the denominator of its loss
    fp: int  # fingerprint of its rows, 64 bits
    bad: bool  # some rank has a row group that it cannot read: the step is not done
    stop: bool  # some rank was asked to stop: the step is not done
    out_of_time: bool  # rank 0's time budget is used up: the step is not done
    save: bool  # a state is saved after this step: by rank 0, or for a late save
    late: bool  # a late save is in progress: meanwhile rank 0 saves nothing
    logged: int  # up to this step the log is durable, as far as rank 0's life has written it
    cursors: np.ndarray  # (lanes, 3) int64: where every lane stands after the step

    @property
    def ends(self) -> bool:
        """Is this the end of the loop, before the step?"""
        return self.stop or self.out_of_time


def agree(
    batch: Batch,
    stop: bool,
    out_of_time: bool,
    save: bool,
    late: bool,
    logged: int,
    world: World,
) -> Agreed:
    """All ranks: one small all-reduce before the step, so that no decision is taken alone.

    The fingerprint travels as two halves, because a sum of int64 may not overflow.
    """
    flags = (batch.bad >= 0, stop, world.rank == 0 and out_of_time, save, late)
    head = [batch.targets, batch.fp & _LOW, batch.fp >> 32, *map(int, flags)]
    head.append(logged if world.rank == 0 else 0)
    mine = np.concatenate([np.array(head, dtype=np.int64), batch.cursors.ravel()])
    total = world.all_reduce(torch.from_numpy(mine)).numpy()
    targets, low, high, bad, stops, out, saves, late_saves, logged = map(int, total[:9])
    return Agreed(
        targets=targets,
        fp=(low + (high << 32)) % 2**64,
        bad=bad > 0,
        stop=stops > 0,
        out_of_time=out > 0,
        save=saves > 0,
        late=late_saves > 0,
        logged=logged,
        cursors=total[9:].reshape(batch.cursors.shape),
    )
