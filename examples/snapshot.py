"""A snapshot to continue a run from its exact step: complete or absent, the same for all ranks."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from ddp import World, log


def random_state(world: World) -> dict[str, torch.Tensor]:
    """The state of this rank's generators, for dropout."""
    state = {"cpu": torch.get_rng_state()}
    if world.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(world.device)
    return state


def set_random_state(state: dict[str, torch.Tensor], world: World) -> None:
    """The opposite of `random_state`."""
    torch.set_rng_state(state["cpu"])
    if world.device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], world.device)


def save(path: Path, state: dict[str, Any], own: dict[str, Any], world: World) -> None:
    """All ranks: save `state`, which is equal on all ranks, and each rank's `own` values.

    Gathering is a collective, so it is before the branch of rank 0: within the branch, rank 0 would
    wait forever for the others. Only one rank writes, not one per node: the folder may be shared.
    """
    owns: list[Any] = [None] * world.world_size
    dist.all_gather_object(owns, own | {"random": random_state(world)})  # all ranks
    if world.rank == 0:
        write(path, state | {"owns": owns})


def write(path: Path, value: Any) -> None:
    """Rank 0 only: write a file for torch.load."""
    with replaced(path) as file:
        torch.save(value, file)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Rank 0 only: a new file that replaces the old one when it is complete, or never.

    Raises SystemExit if it cannot be written.
    """
    part = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # the content is on the disk before it has its final name
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # now the name is on the disk
        finally:
            os.close(folder)
    except OSError as error:
        raise SystemExit(
            f"{path} cannot be written ({error.strerror}): make room, or give another --folder"
        ) from error


def load(path: Path, settings: dict[str, Any], world: World) -> dict[str, Any] | None:
    """All ranks: the newest snapshot that any rank can read, sent to all; None: there is none.

    Nodes need not share a disk: a rank with no file or a damaged one gets the file of another rank.
    Raises SystemExit, on all ranks, if all files are damaged, or the settings differ.
    """
    state, trouble = _read(path)
    found: list[Any] = [None] * world.world_size
    dist.all_gather_object(found, (state and state["position"], trouble))  # all ranks
    positions = [position for position, _ in found if position]
    troubles = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(found) if text]
    if not positions:
        if troubles:
            raise SystemExit(
                f"{'; '.join(troubles)}. Put a copy in its place, or remove it to start again"
            )
        return None
    source = [position for position, _ in found].index(max(positions))
    for text in troubles:
        log.info("%s; the file of rank %d is used", text, source)
    box = [state if world.rank == source else None]
    dist.broadcast_object_list(box, src=source)  # all ranks
    state = box[0]
    assert state is not None
    for name, value in settings.items():
        if (before := state["settings"].get(name)) != value:
            raise SystemExit(
                f"{name.replace('_', '-')} is {value!r}, but {path} has {before!r}: give the old "
                "value, or another --folder"
            )
    return state


def own_of(state: dict[str, Any], world: World) -> dict[str, Any]:
    """Return this rank's own values, and set its generators.

    After a change of the world size the ranks have changed: rank 0 gets the sums of all ranks, the
    others zeros, and random numbers follow the seed.
    """
    owns = state["owns"]
    if len(owns) == world.world_size:
        set_random_state(owns[world.rank]["random"], world)
        return owns[world.rank]
    log.info("world size %d before, now %d: batches differ", len(owns), world.world_size)
    names = owns[0].keys() - {"random"}
    return {name: sum(own[name] for own in owns) * (world.rank == 0) for name in names}


def _read(path: Path) -> tuple[dict[str, Any] | None, str]:
    """(content of the file, or None; error message, or ""). (None, "") if there is no file.

    It loads to the CPU: otherwise every rank would load onto the GPU of the rank that wrote it.
    `weights_only`: only tensors and plain values, so that no file can run code.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        _ = state["position"], state["settings"], state["owns"]  # is it a snapshot of ours?
        return state, ""
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except Exception as error:  # torch raises many types for damaged files
        return None, f"{path} is damaged, or no snapshot ({type(error).__name__})"
