"""Which code has made which steps of a run: what is installed, or own code laid over it."""

from collections.abc import Mapping
from itertools import groupby


def named(code: object) -> str:
    """Code in words, by the hash that a start has in the ledger; it has none of what is installed.

    Twelve digits of 64 tell one code from another.
    """
    return f"own code {code[:12]}" if isinstance(code, str) and code else "the installed code"


def made_by(lives: Mapping[int, int], codes: Mapping[int, str | None]) -> list[str]:
    """`own code 3f2a91c0b7de: steps 1 to 40`, by the life of each step and the code of each life.

    Nothing where no life had code of its own.
    """
    found = []
    for code, group in groupby(sorted(lives), key=lambda step: codes.get(lives[step])):
        steps = list(group)
        found.append(f"{named(code)}: steps {steps[0]} to {steps[-1]}")
    return found if any(codes.get(life) for life in lives.values()) else []
