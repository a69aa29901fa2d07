"""A broken rule of a job, and the rules of any PyTorchJob."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from gptddp.k8s.objects import Object
from gptddp.k8s.render import names

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
JobRule = Callable[[Object], Iterator[Found]]
JOB_RULES: dict[str, JobRule] = {}


def label_problems(key: str, value: str | None) -> Iterator[tuple[str, str]]:
    """(rule, fix) for what the API does not take in a label; `value`: None of an annotation."""
    if not names.is_key(key):
        yield f"{key!r} is not a key", "use a name as in team or example.com/team"
    if value is not None and not names.is_value(value):
        rule = f"{value!r} is not a value: up to 63 letters, digits, '-', '_' and '.'"
        yield rule, "begin and end it with a letter or digit"


def job_rule(function: JobRule) -> JobRule:
    """Register a rule of any PyTorchJob; its id is the function's name with dashes."""
    JOB_RULES[function.__name__.strip("_").replace("_", "-")] = function
    return function
