"""Which lives of the run this pod has been in: they prove that the life before is over.

A life needs all of its ranks. So a pod that was in one and now begins another proves that the one
is over, wherever its rank 0 may be: killed, or cut off and not aware of it yet. Nothing else proves
it: not the name of a job, which one manifest has in two clusters, nor that of a pod, which a pod
that is cut off shares with its replacement.

Rank 0 draws an id for each life. Every rank notes it beside its launcher, which outlives the
workers, and does so before rank 0 takes the run's lease (run/lease.py).

The same notes tell who was lost, where a survivor knows only that a connection was closed: the
launcher adds how a worker has died, and a pod without a note of the life has been started anew.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gptddp.distributed import environment
from gptddp.files import read_json, write_json_atomic

# A life that ends before it has the lease leaves that of an earlier one, but not so many in a row.
_KEPT = 8
_MOST_NAMED = 4  # of the ranks that were lost

log = logging.getLogger(__name__)


class Came(NamedTuple):
    """What the pod of a rank of this world has to say of earlier ones."""

    pod: str  # its name, "" where it has none
    lives: Sequence[str]  # that it has been in, as `noted`
    deaths: Sequence[Sequence[str]]  # of its workers, as `deaths`


def lost(life: str, pods: Sequence[str], came: Sequence[Came]) -> str:
    """Which ranks of an earlier life were lost, and how, as the ranks of this one know; or "".

    `pods`: by rank of that life. A rank that is not named was alive when its world had broken.
    """
    died = {rank: how for it in came for its_life, rank, how in it.deaths if its_life == life}
    there, stayed = {it.pod for it in came}, {it.pod for it in came if life in it.lives}
    found = []
    for rank, pod in enumerate(pods):
        if str(rank) in died:
            what = f"whose process {died[str(rank)]}"
        elif pod in stayed or not pod:
            continue
        else:
            what = "whose pod was started anew" if pod in there else "whose pod is not there now"
        found.append(f"rank {rank} ({pod}), {what}" if pod else f"rank {rank}, {what}")
    more = f"; {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    return "; ".join(found[:_MOST_NAMED]) + more


def deaths() -> list[list[str]]:
    """Of this pod's workers: the id of the life, the rank in it, and how each has died."""
    try:
        path = _path("deaths.json")
        rows = [[str(it) for it in row] for row in (read_json(path) if path else None) or ()]
        return [row for row in rows if len(row) == 3]
    except (OSError, ValueError, TypeError):
        return []


def note_death(rank: int, how: str) -> None:
    """The launcher: its worker with this rank in the newest life that is noted has died so."""
    try:
        if (path := _path("deaths.json")) and (lives := noted()):
            write_json_atomic(path, [*deaths()[1 - _KEPT :], [lives[-1], str(rank), how]])
    except OSError as error:
        log.warning("how rank %d has died is not noted: %s", rank, error)


def noted() -> list[str]:
    """The ids of the newest lives that this pod has been in; none without a launcher of ours.

    For its workers, and for the launcher itself.
    """
    try:
        path = _path("lives.json")
        return [str(life) for life in (read_json(path) if path else None) or ()]
    except (OSError, ValueError, TypeError) as error:
        log.warning("the lives of this pod are not known, so the next may have to wait: %s", error)
        return []


def note(life: str) -> None:
    """This pod takes part in the life. Where that cannot be written, the next may have to wait."""
    try:
        if path := _path("lives.json"):
            earlier = [it for it in noted() if it != life]
            write_json_atomic(path, [*earlier[1 - _KEPT :], life])
    except OSError as error:
        log.warning("this life is not noted, so the next may have to wait: %s", error)


def _path(name: str) -> Path | None:
    verdict = environment.verdict()
    return verdict and verdict.with_name(name)
