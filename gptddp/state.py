"""What all ranks agree on in a step, and what the run has come to so far."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from gptddp.dist import Dist
from gptddp.errors import CheckpointError
from gptddp.loader import Batch

_LOW = 0xFFFFFFFF
CHECK_EVERY = 100  # steps between two looks whether the ranks still hold the same


@dataclass(frozen=True)
class Agreed:
    """The sum over all ranks of what each brought to the step."""

    targets: int  # valid targets of the whole step, the denominator of its loss
    fp: int  # fingerprint of its rows, 64 bits
    bad: bool  # some rank has a row group that it cannot read: the step is not done
    stop: bool  # some rank was asked to stop: the step is not done
    out_of_time: bool  # rank 0's time budget is used up: the step is not done
    save: bool  # rank 0 saves a checkpoint after this step
    cursors: np.ndarray  # (lanes, 3) int64: where every lane stands after the step


def agree(batch: Batch, stop: bool, out_of_time: bool, save: bool, world: Dist) -> Agreed:
    """All ranks: one small all-reduce before the step, so that no decision is taken alone.

    The fingerprint travels as two halves, because a sum of int64 may not overflow.
    """
    flags = (batch.bad >= 0, stop, world.rank == 0 and out_of_time, world.rank == 0 and save)
    head = [batch.targets, batch.fp & _LOW, batch.fp >> 32, *map(int, flags)]
    mine = np.concatenate([np.array(head, dtype=np.int64), batch.cursors.ravel()])
    total = world.all_reduce(torch.from_numpy(mine)).numpy()
    targets, low, high, bad, stops, out, saves = (int(value) for value in total[:7])
    return Agreed(
        targets=targets,
        fp=(low + (high << 32)) % 2**64,
        bad=bad > 0,
        stop=stops > 0,
        out_of_time=out > 0,
        save=saves > 0,
        cursors=total[7:].reshape(batch.cursors.shape),
    )


@dataclass
class Progress:
    """How far the run has come: with the tensors and the data position, all of its state."""

    step: int = 0  # finished optimizer steps
    tokens: int = 0  # trained targets
    chain_fp: int = 0  # folds the fingerprint of every step since the first
    train_s: float = 0.0  # seconds in steps, over all lives
    skipped: int = 0  # non-finite steps in a row
    data: dict[str, Any] = field(default_factory=dict)  # the loader's state after `step`

    def advance(self, agreed: Agreed, finite: bool, step_s: float, data: dict[str, Any]) -> None:
        """Count one finished step. A skipped one has used its data like any other."""
        self.step += 1
        self.tokens += agreed.targets
        self.chain_fp = fold(self.chain_fp, agreed.fp)
        self.train_s += step_s
        self.skipped = 0 if finite else self.skipped + 1
        self.data = data

    def to_meta(self) -> dict[str, Any]:
        """As JSON; 64-bit numbers as 16 hex digits."""
        return vars(self) | {"chain_fp": f"{self.chain_fp:016x}"}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> "Progress":
        """The inverse of to_meta; an empty mapping is the beginning of a run."""
        return cls(**{**meta, "chain_fp": int(meta["chain_fp"], 16)}) if meta else cls()


def fold(chain_fp: int, batch_fp: int) -> int:
    """The next chain fingerprint: a hash of the chain so far and the step's own."""
    both = chain_fp.to_bytes(8, "little") + batch_fp.to_bytes(8, "little")
    return int(xxhash.xxh3_64_intdigest(both))


class Diverged(RuntimeError):
    """The ranks do not hold the same state: what each holds is worth nothing."""

    def __init__(self, digests: Mapping[int, int], step: int, world: Dist) -> None:
        value, count = Counter(digests.values()).most_common(1)[0]
        told = 2 * count > len(digests)
        self.ranks = [rank for rank, digest in digests.items() if not told or digest != value]
        self.names = [world.name(rank) for rank in self.ranks]
        which = f"{', '.join(self.names)} differ{'s' if len(self.ranks) == 1 else ''} from the rest"
        if not told:
            which = f"there is no majority to tell which of {' and '.join(self.names)} is wrong"
        super().__init__(
            f"after step {step} the ranks do not hold the same parameters and optimizer state: "
            f"{which}. Going back to the newest checkpoint; a pod that is named again and again is "
            "on broken hardware, or on another kind of processor than the rest"
        )


def check_replicas(tensors: Mapping[str, Tensor], step: int, world: Dist) -> None:
    """All ranks: raise Diverged on every rank unless all hold the same bytes."""
    digest = xxhash.xxh3_64()
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        digest.update(flat.numpy().data)
    table = torch.zeros(world.world_size, dtype=torch.int64)
    table[world.rank] = digest.intdigest() >> 1  # fits in int64
    digests = dict(enumerate(world.all_reduce(table).tolist()))
    if len(set(digests.values())) > 1:
        raise Diverged(digests, step, world)


@torch.no_grad()
def copy_into(live: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into the live ones of the same names, shapes and dtypes.

    Raises CheckpointError when they are not the same: then the checkpoint is another model's.
    """
    for name in live.keys() | saved.keys():
        kinds = [(tuple(t.shape), t.dtype) if (t := d.get(name)) is not None else "absent"
                 for d in (saved, live)]  # fmt: skip
        if kinds[0] != kinds[1]:
            raise CheckpointError(
                f"tensor {name} is {kinds[0]} in the checkpoint and {kinds[1]} in this model: "
                "it belongs to another configuration or vocabulary; give another --run-dir"
            )
    for name, tensor in live.items():
        tensor.copy_(saved[name])
