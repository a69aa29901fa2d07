"""What is wrong with a job: the field, the rule that it breaks, and the fix."""

from collections.abc import Iterable
from typing import NamedTuple

from gptddp.errors import ConfigError


class Problem(NamedTuple):
    """One broken rule: where, what the rule is, and what to do."""

    id: str
    field: str
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field}: {self.rule}; {self.fix} [{self.id}]"


def refuse(problems: Iterable[Problem]) -> None:
    """Raise ConfigError that lists the problems, one a line; nothing if there is none."""
    if found := list(problems):
        raise ConfigError("\n".join(map(str, found)))
