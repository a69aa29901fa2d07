"""A problem of a job: the field, the broken rule, and the fix."""

from collections.abc import Iterable
from typing import NamedTuple

from gptddp.errors import ConfigError


class Problem(NamedTuple):
    """One broken rule: the field, the rule, and the fix."""

    id: str
    field: str
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field}: {self.rule}; {self.fix} [{self.id}]"


def refuse(problems: Iterable[Problem]) -> None:
    """Raise ConfigError that lists the problems, one per line, if there are any."""
    if found := list(problems):
        raise ConfigError("\n".join(map(str, found)))
