"""The runs of a sweep: every combination of the values that some fields are given.

A run is named by its own values, such as `lr-3e-3-seed-1`: as a folder, and as a Kubernetes job.
Values that are given later add runs, and leave the names of the others as they are.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from gptddp.config import FIELDS, START, Config
from gptddp.errors import ConfigError
from gptddp.flags import did_you_mean, flag, from_text, texts

_WHOLE = 10**6  # numbers up to here have all of their digits in a name


def configurations(
    swept: Mapping[str, str], base: Config, train_args: Sequence[str]
) -> dict[str, Config]:
    """The configuration of each run by its name, in the order in which they are trained.

    swept: the values of each field, as in {"lr": "1e-3,3e-3"}; the last field changes fastest.
    base: what all runs have, of which `train_args` were given as flags. Raises ConfigError for a
    field that cannot be swept, and for values that cannot work.
    """
    if not swept:
        raise ConfigError("nothing is swept: give a field its values, as in --lr 1e-3,3e-3")
    both = swept.keys() & texts(train_args).keys()
    if fields := [flag(name) for name in swept if name in both]:
        raise ConfigError(f"{fields[0]} is swept, and given after --: leave one of them out")
    values = {name: _values(name, text) for name, text in swept.items()}
    found: dict[str, Config] = {}
    for chosen in itertools.product(*values.values()):
        fields_of_run = dict(zip(values, chosen, strict=True))
        found[name_of(fields_of_run)] = dataclasses.replace(base, **fields_of_run)
    return found


def _values(name: str, text: str) -> list[Any]:
    if name not in {*FIELDS, "config"}:
        known = [it for it in FIELDS if _is_of_run(it)]
        raise ConfigError(f"unknown field {name!r}{did_you_mean(name, known)}")
    if not _is_of_run(name):
        raise ConfigError(
            f"{flag(name)} cannot be swept: it is the same for all runs, give it once, after --"
        )
    words = [word.strip() for word in text.split(",")]
    if FIELDS[name].type == tuple[float, float]:
        words = [",".join(words[i : i + 2]) for i in range(0, len(words), 2)]
    return [from_text(name, word) for word in words]


def _is_of_run(name: str) -> bool:
    return name not in ("config", "init_sha256") and FIELDS[name].metadata["fate"] != START


def name_of(fields: Mapping[str, Any]) -> str:
    """The name of a run with these values; the order of the fields is that of the configuration."""
    parts = [f"{name.replace('_', '-')}-{_text(fields[name])}" for name in FIELDS if name in fields]
    return "-".join(parts)


def _text(value: Any) -> str:
    """A value in lower case letters, digits and '-', so without a point: 0.0012 is 12e-4."""
    if isinstance(value, tuple):
        return "-".join(map(_text, value))
    if not isinstance(value, float):
        return str(value).lower()
    if value < _WHOLE and value.is_integer():
        return str(int(value))
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    return f"{''.join(map(str, digits))}e{exponent}"
