"""A snapshot from which a run goes on at its very step: whole or absent, the same for all ranks."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from ddp import World, log


def random_state(world: World) -> dict[str, torch.Tensor]:
    """The state of this rank's generators: what dropout draws from."""
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
    """All ranks: `state`, which is the same on each, and what each has of its `own`.

    The gathering is a collective, so it stands before the branch of rank 0: within it, rank 0 would
    wait for the others for ever. One writer in all, not one a node: the folder may be shared.
    """
    owns: list[Any] = [None] * world.world_size
    dist.all_gather_object(owns, own | {"random": random_state(world)})  # all ranks
    if world.rank == 0:
        write(path, state | {"owns": owns})


def write(path: Path, value: Any) -> None:
    """Rank 0 only: what torch.load reads."""
    with replaced(path) as file:
        torch.save(value, file)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """Rank 0 only: a file that takes the place of the old one when it is whole, or never.

    Raises SystemExit where it cannot be written.
    """
    part = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # the content is on the disk before it has the name
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # and now the name is
        finally:
            os.close(folder)
    except OSError as error:
        raise SystemExit(
            f"{path} cannot be written ({error.strerror}): make room, or give another --folder"
        ) from error


def load(path: Path, settings: dict[str, Any], world: World) -> dict[str, Any] | None:
    """All ranks: the newest snapshot that any rank can read, the same on each; None: there is none.

    Nodes need not share a disk: a rank whose node has no file, or a damaged one, is sent another's.
    Raises SystemExit, on all ranks, where there are damaged ones only, or one of other settings.
    """
    state, trouble = _read(path)
    found: list[Any] = [None] * world.world_size
    dist.all_gather_object(found, (state and state["position"], trouble))  # all ranks
    positions = [position for position, _ in found if position]
    troubles = [f"rank {rank}: {text}" for rank, (_, text) in enumerate(found) if text]
    if not positions:
        if troubles:
            raise SystemExit(
                f"{'; '.join(troubles)}. Put a copy in its place, or remove it to begin anew"
            )
        return None
    source = [position for position, _ in found].index(max(positions))
    for text in troubles:
        log.info("%s; rank %d's is used", text, source)
    box = [state if world.rank == source else None]
    dist.broadcast_object_list(box, src=source)  # all ranks
    state = box[0]
    assert state is not None
    for name, value in settings.items():
        if (before := state["settings"].get(name)) != value:
            raise SystemExit(
                f"{name.replace('_', '-')} is {value!r}, but {path} has {before!r}: give it as it "
                "was, or another --folder"
            )
    return state


def own_of(state: dict[str, Any], world: World) -> dict[str, Any]:
    """This rank's own part, with its generators set.

    At another world size than before, rank r is another: rank 0 takes what all had together, the
    others nothing, and random numbers are left to the seed.
    """
    owns = state["owns"]
    if len(owns) == world.world_size:
        set_random_state(owns[world.rank]["random"], world)
        return owns[world.rank]
    log.info("world size %d before, now %d: other batches", len(owns), world.world_size)
    names = owns[0].keys() - {"random"}
    return {name: sum(own[name] for own in owns) * (world.rank == 0) for name in names}


def _read(path: Path) -> tuple[dict[str, Any] | None, str]:
    """What is in the file, or the trouble with it; neither where there is no file.

    On the CPU, wherever it was: else every rank would load it onto the GPU of the one that wrote.
    `weights_only`: tensors and plain values, so that no file can run code.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        _ = state["position"], state["settings"], state["owns"]  # of ours, not just any file
        return state, ""
    except (FileNotFoundError, NotADirectoryError):
        return None, ""
    except Exception as error:  # torch raises whatever the damage looks like to it
        return None, f"{path} is damaged, or no snapshot ({type(error).__name__})"
