"""The required forms of option texts, each with its name, and an example in its fix.

Patterns are compiled on first use, to keep the start fast.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from gptddp.flags import flag
from gptddp.k8s.render import quantity
from gptddp.k8s.render.problem import Problem

# Values of --without: the companion's kind in lower case.
COMPANIONS = {k.lower(): k for k in ("ServiceAccount", "NetworkPolicy", "PodDisruptionBudget")}
TOLERATION = r"([^=:\s]+)(?:=([^=:\s]*))?(?::(NoSchedule|PreferNoSchedule|NoExecute))?"
# NAME=SECRET/KEY, or SECRET: all its keys
ENV_FROM = r"(?:([^=/\s]+)=([^=/\s]+)/([^=/\s]+)|([^=/\s]+))"

_PART = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_OBJECT = rf"(?=.{{1,253}}$){_PART}(\.{_PART})*"
_COMPONENT = r"[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*"
_HOST = r"[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?"
_IMAGE = (
    rf"((localhost|{_HOST}(\.{_HOST})+|{_HOST}(?=:)|\[[0-9a-fA-F:]+\])(:\d{{1,5}})?/)?"
    rf"{_COMPONENT}(/{_COMPONENT})*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@[A-Za-z][A-Za-z0-9_+.-]*:[0-9a-fA-F]{32,})?"
)


class Form(NamedTuple):
    """A form: its name, the test whether a text fits, and the fix."""

    what: str
    fits: Callable[[str], Any]
    fix: str

    def problems(self, where: str, text: str) -> Iterator[Problem]:
        """The problem of a text that does not fit."""
        if not self.fits(text):
            yield Problem("format", where, f"{text!r} is not {self.what}", self.fix)


def _like(pattern: str) -> Callable[[str], Any]:
    return lambda text: re.fullmatch(pattern, text)


JOB = Form(
    "the name of a job",
    _like("[a-z]([-a-z0-9]*[a-z0-9])?"),  # the rule `name` limits its length
    "use lower case letters, digits and '-', with a letter first and no '-' at the end",
)
LABEL = Form(
    "a DNS label",
    _like(rf"(?=.{{1,63}}$){_PART}"),
    "use up to 63 lower case letters, digits and '-'",
)
OBJECT = Form(
    "the name of an object", _like(_OBJECT), "use lower case letters, digits, '-' and '.'"
)
CLAIM = Form(
    "the name of a PersistentVolumeClaim, or CLAIM/PATH",
    _like(rf"{_PART}(\.{_PART})*(/(?!.*\.\.(/|$)).*)?"),
    "use one such as data or data/books; with --local, --volume CLAIM=FOLDER sets its folder",
)
IMAGE = Form(
    "an image that a node can pull",
    _like(_IMAGE),
    "use one such as registry.example/gptddp:0.2.0, its name in lower case",
)
CPUS = Form(
    "a number of CPUs up to 1024",
    lambda text: 0.001 <= quantity.number(text) <= 1024,
    "use one such as 500m or 2",
)
BYTES = Form(
    "an amount of memory of at least 64Mi",  # less: the unit was forgotten
    lambda text: 2**26 <= quantity.number(text) <= 2**60,
    "use one such as 512Mi or 4Gi",
)
RESOURCE = Form(
    "a resource of nodes",
    _like(rf"{_PART}(\.{_PART})*/[^=\s]+"),
    "use DOMAIN/NAME, such as nvidia.com/gpu",
)
AMOUNT = Form(
    "an amount of a resource of nodes",
    lambda text: (
        (found := re.fullmatch(r"(?:[a-z0-9.-]+/[^=\s]+|hugepages-\w+)=([^=\s]+)", text))
        and quantity.number(found[1]) > 0
    ),
    "use one such as vpc.amazonaws.com/efa=4 or hugepages-2Mi=1Gi",
)
TAINT = Form(
    "a taint",
    _like(TOLERATION),
    "use one such as nvidia.com/gpu:NoSchedule or dedicated=training",
)
FROM_SECRET = Form(
    "a variable from a Secret",
    _like(ENV_FROM),
    "use NAME=SECRET/KEY, or SECRET for all its keys",
)
COMPANION = Form("an object beside a job", COMPANIONS.__contains__, f"use {', '.join(COMPANIONS)}")
TOPOLOGY = Form(
    "a topology",
    _like("(required|preferred)=[^=]+|unconstrained"),
    "use required=LABEL or preferred=LABEL with a label of nodes, or unconstrained",
)
FORMS = {  # field of a job -> form
    "name": JOB, "namespace": LABEL, "image": IMAGE, "data": CLAIM, "runs": CLAIM,
    "cpu": CPUS, "memory": BYTES, "shm": BYTES, "gpu_resource": RESOURCE, "resource": AMOUNT,
    "queue": OBJECT, "priority": OBJECT, "topology": TOPOLOGY, "priority_class": OBJECT,
    "toleration": TAINT, "service_account": OBJECT, "image_pull_secret": OBJECT,
    "env_from_secret": FROM_SECRET, "without": COMPANION,
}  # fmt: skip


def problems(values: Mapping[str, Any]) -> Iterator[Problem]:
    """A problem for each text of these fields that does not fit; pairs are tested as KEY=VALUE."""
    for name, form in FORMS.items():
        value = values.get(name)
        for text in [value] if isinstance(value, str) else value or ():
            yield from form.problems(flag(name), text if isinstance(text, str) else "=".join(text))
