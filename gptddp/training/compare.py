"""The first act in a new world: compare the states of its ranks, and hand the newest over."""

from collections.abc import Sequence
from typing import Any

from gptddp.distributed.hardware import machine
from gptddp.errors import ConfigError, Diverged, LifeLost, LostPeer
from gptddp.run.progress import Progress
from gptddp.training.parts import DUE, LifeParts


def compare(life: LifeParts, layout: int, records: bool) -> tuple[int, bool]:
    """All ranks: compare their states, and give the newest to the ranks that lack it.

    Tensors are not hashed, because that would take longer than all the rest. Ranks that did the
    same steps on the same rows have the same state, and `Life.is_check_due` compares it soon. At
    the same step a rank may know more than a rank that was interrupted: a quarantine or evaluation.

    `layout`: of DDP's buckets on this rank; `records`: does this rank have ledger, log and lease,
    or take them over? Returns a rank that had the newest state, and whether rank 0 lacks the
    records. Raises Diverged; LifeLost if no rank has a state; ConfigError on a rank that would add
    up gradients in another order.
    """
    world = life.world
    step = life.step if life.live.is_whole else -1
    place = step, len(life.progress.data.get("quarantined", ()))
    known = {it: life.line[it] for it in DUE if it in life.line}
    generation = life.recorder.generation if life.recorder else life.generation
    about = life.progress.chain_fp, layout, generation, records, machine(world.device), known
    rows = world.gather((place, *about, life.rows.owners, life.handed_on))  # all ranks
    places, chains, layouts, generations, have_records, machines, lines, owners, handed_on = zip(
        *rows, strict=True
    )
    if (newest := max(places))[0] < 0:
        raise LifeLost("all ranks that had the state are lost")
    have = [rank for rank, it in enumerate(places) if it == newest]
    giver = have[0]
    if len({chains[rank] for rank in have}) > 1:
        raise Diverged({rank: chains[rank] for rank in have}, step, world.names)
    if layout != layouts[giver]:
        raise ConfigError(
            "this worker's DDP would add up gradients in another order than the running ranks: "
            "all pods of a run must have the same torch, on the same kind of device"
        )
    if len({*layouts}) > 1:
        raise LostPeer("a joining worker would add up gradients in another order, so it ends")
    for rank in have if world.rank in have else ():
        life.line |= lines[rank]
    if life.line:
        life.live.keep(life.line)
    life.generation, life.machines = max(generations), sorted({*machines})
    life.rows.owners = owners[giver]  # from which all ranks find the same new owners
    life.handed_on = max(handed_on)  # the last comparison may have broken off before its end
    if lack := [rank for rank in range(world.world_size) if rank not in have]:
        # joiners first: a rank that is only a step behind keeps its state as long as it can
        _hand_over(life, giver, sorted(lack, key=lambda rank: places[rank]))
        life.handed_on = life.step
    return giver, not have_records[0]


def _hand_over(life: LifeParts, giver: int, lack: Sequence[int]) -> None:
    """All ranks: send the state and the records of the rank `giver` to the ranks in `lack`.

    Each has the whole state as soon as it has its part, so it can replace the giver.
    """
    world = life.world
    has_it = world.rank not in lack
    about = [life.progress.to_meta(), life.line, *life.live.kept()] if has_it else None
    about = world.broadcast_value(about, giver)  # all ranks
    for rank in lack:
        life.live.is_whole &= world.rank != rank
        world.send(life.tensors.values(), giver, rank)  # all ranks
        if world.rank == rank:
            _take(life, about)


def _take(life: LifeParts, about: Any) -> None:
    """Take the records that belong to the state of this rank's tensors."""
    meta, line, lines, events = about
    left_out = set(life.progress.data.get("quarantined", ()))
    for event in events:
        new = event["event"] == "quarantine" and not left_out.issuperset(event["row_groups"])
        if new and life.recorder:  # rank 0's ledger must have each decision
            life.recorder.events.emit("quarantine", **event)
    vars(life.progress).update(vars(Progress.from_meta(meta)))
    life.line = line
    life.live.take_over({it["step"]: it for it in lines}, events)
    life.live.is_whole = True
