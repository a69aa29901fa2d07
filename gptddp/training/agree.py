"""The agreement of all ranks before a step."""

from dataclasses import dataclass

import numpy as np
import torch

from gptddp.data.loader import Batch
from gptddp.distributed.connect import World
from gptddp.training.clock import RankSeconds

_LOW = 0xFFFFFFFF
_MOST_S = 2.0**40  # microseconds must fit into int64, also from a state written by hand


@dataclass(frozen=True)
class Agreed:
    """Sums over all ranks, of their contributions to a step."""

    targets: int  # valid targets of the whole step, the denominator of its loss
    fp: int  # fingerprint of its rows, 64 bits
    bad: bool  # a rank cannot read a row group: the step is not done
    stop: int  # number of ranks asked to stop
    late: int  # number of ranks asked to stop long ago
    news: int  # number of ranks that know of a newer view
    save: bool  # rank 0 saves the state after this step
    generation: int  # of rank 0's records; 0: not taken over yet
    logged: int  # the log of rank 0's life is durable up to this step
    train_s: float  # seconds of training before the step, on rank 0, in whole microseconds
    cursors: np.ndarray  # (lanes, 3) int64: position of every lane after the step


def agree(
    batch: Batch,
    said: tuple[bool, bool, bool, bool],
    of_0: tuple[int, int, float],
    spent: RankSeconds,
    world: World,
) -> Agreed:
    """All ranks: one small all-reduce before the step, so that no rank decides alone.

    `said`: stop, late, news and save of this rank; `of_0`: generation, logged and train_s, used
    from rank 0 only. The clocks of all ranks, and their peak memory, travel with it into `spent`.

    The fingerprint travels as two halves, because a sum of int64 must not overflow. The seconds
    travel as whole microseconds, so all ranks get the same float and the same learning rate.
    """
    head = [batch.targets, batch.fp & _LOW, batch.fp >> 32, int(batch.bad >= 0), *map(int, said)]
    generation, logged, train_s = of_0
    records = [generation, logged, round(min(train_s, _MOST_S) * 1e6)]
    head += records if world.rank == 0 else [0, 0, 0]
    rows = spent.mine()
    mine = np.concatenate([np.array(head, dtype=np.int64), batch.cursors.ravel(), rows.ravel()])
    total = world.all_reduce(torch.from_numpy(mine)).numpy()
    end = len(mine) - rows.size
    spent.take(total[end:].reshape(rows.shape))
    targets, low, high, bad, stop, late, news, save, *records = map(int, total[: len(head)])
    return Agreed(
        targets=targets,
        fp=(low + (high << 32)) % 2**64,
        bad=bad > 0,
        stop=stop,
        late=late,
        news=news,
        save=save > 0,
        generation=records[0],
        logged=records[1],
        train_s=records[2] / 1e6,
        cursors=total[len(head) : end].reshape(batch.cursors.shape),
    )
