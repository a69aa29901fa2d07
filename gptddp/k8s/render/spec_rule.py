"""The rules that judge what the user of a job gave; a manifest is judged without these."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from gptddp.k8s.render.problem import Found

if TYPE_CHECKING:
    from gptddp.k8s.render.spec import JobSpec

SpecRule = Callable[["JobSpec"], Iterator[Found]]
SPEC_RULES: dict[str, SpecRule] = {}


def spec_rule(function: SpecRule) -> SpecRule:
    """Register a rule; its id is the function's name with dashes."""
    SPEC_RULES[function.__name__.strip("_").replace("_", "-")] = function
    return function
