"""The code that computed each step of a run: the installed code, or own code laid over it."""

from collections.abc import Mapping
from itertools import groupby


def named(code: object) -> str:
    """The name of code in texts. `code`: its hash in a start event; None for the installed code.

    Twelve of the hash's 64 digits are enough to distinguish codes.
    """
    return f"own code {code[:12]}" if isinstance(code, str) and code else "the installed code"


def made_by(lives: Mapping[int, int], codes: Mapping[int, str | None]) -> list[str]:
    """Lines such as `own code 3f2a91c0b7de: steps 1 to 40`; [] if no life had own code.

    `lives`: the life of each step. `codes`: the code of each life.
    """
    found = []
    for code, group in groupby(sorted(lives), key=lambda step: codes.get(lives[step])):
        steps = list(group)
        found.append(f"{named(code)}: steps {steps[0]} to {steps[-1]}")
    return found if any(codes.get(life) for life in lives.values()) else []
