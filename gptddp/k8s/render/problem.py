"""A broken rule of a job; the rules that judge what its user gave, and those of any PyTorchJob."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from gptddp.k8s.objects import Object

if TYPE_CHECKING:  # a manifest is judged without all that makes one
    from gptddp.k8s.render.spec import JobSpec

REPLICAS = "spec.pytorchReplicaSpecs"


class Problem(NamedTuple):
    """One broken rule: where, what the rule is, and what to do."""

    id: str
    field: str
    rule: str
    fix: str

    def __str__(self) -> str:
        return f"{self.field}: {self.rule}; {self.fix} [{self.id}]"


Found = tuple[str, str, str]  # field, rule, fix
SpecRule = Callable[["JobSpec"], Iterator[Found]]
JobRule = Callable[[Object], Iterator[Found]]
SPEC_RULES: dict[str, SpecRule] = {}
JOB_RULES: dict[str, JobRule] = {}


def spec_rule(function: SpecRule) -> SpecRule:
    """Register a rule; its id is the function's name with dashes."""
    SPEC_RULES[function.__name__.strip("_").replace("_", "-")] = function
    return function


def job_rule(function: JobRule) -> JobRule:
    """Register a rule of any PyTorchJob; its id is the function's name with dashes."""
    JOB_RULES[function.__name__.strip("_").replace("_", "-")] = function
    return function
