"""Which lives of the run this pod has been in: they prove that the life before is over.

A life needs all of its ranks. So a pod that was in one and now begins another proves that the one
is over, wherever its rank 0 may be: killed, or cut off and not aware of it yet. Nothing else proves
it: not the name of a job, which one manifest has in two clusters, nor that of a pod, which a pod
that is cut off shares with its replacement.

Rank 0 draws an id for each life. Every rank notes it beside its launcher, which outlives the
workers, and does so before rank 0 takes the run's lease (run/lease.py).
"""

import logging
from pathlib import Path

from gptddp.distributed import environment
from gptddp.files import read_json, write_json_atomic

# A life that ends before it has the lease leaves that of an earlier one, but not so many in a row.
_KEPT = 8

log = logging.getLogger(__name__)


def noted() -> list[str]:
    """The ids of the newest lives that this pod has been in; none without a launcher of ours.

    For its workers, and for the launcher itself.
    """
    try:
        path = _path()
        return [str(life) for life in (read_json(path) if path else None) or ()]
    except (OSError, ValueError, TypeError) as error:
        log.warning("the lives of this pod are not known, so the next may have to wait: %s", error)
        return []


def note(life: str) -> None:
    """This pod takes part in the life. Where that cannot be written, the next may have to wait."""
    try:
        if path := _path():
            earlier = [it for it in noted() if it != life]
            write_json_atomic(path, [*earlier[1 - _KEPT :], life])
    except OSError as error:
        log.warning("this life is not noted, so the next may have to wait: %s", error)


def _path() -> Path | None:
    verdict = environment.verdict()
    return verdict and verdict.with_name("lives.json")
