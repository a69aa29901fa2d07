"""The runs of a sweep: every combination of the values of some fields.

A run's folder and job are named by its values, as in `lr-3e-3-seed-1`.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from gptddp.config import FIELDS, START, Config
from gptddp.errors import ConfigError
from gptddp.flags import did_you_mean, flag, from_text, texts


def configurations(
    swept: Mapping[str, str], base: Config, train_args: Sequence[str]
) -> dict[str, Config]:
    """The configuration of each run by its name, in the order in which they are trained.

    swept: the values of each field, as in {"lr": "1e-3,3e-3"}; the last field changes fastest; {}:
    one run, without a name. base: the common configuration; `train_args`: its flags. Raises
    ConfigError for a field that cannot be swept, and for invalid values.
    """
    for name in swept.keys() & texts(train_args).keys():
        raise ConfigError(f"{flag(name)} is given before and after --: leave out one of them")
    values = {name: _values(name, text) for name, text in swept.items()}
    combinations = itertools.product(*values.values())
    runs = [dict(zip(values, it, strict=True)) for it in combinations]
    return {name_of(it): dataclasses.replace(base, **it) for it in runs}


def _values(name: str, text: str) -> list[Any]:
    if name not in {*FIELDS, "config"}:
        raise ConfigError(f"unknown field {name!r}{did_you_mean(name, FIELDS)}")
    # hashes and paths are no values to compare, and a pair of betas contains a comma
    if name in ("config", "init_sha256", "betas") or FIELDS[name].metadata["fate"] == START:
        raise ConfigError(f"{flag(name)} cannot be swept: give it once for all runs, after --")
    return [from_text(flag(name), name, word.strip()) for word in text.split(",")]


def name_of(fields: Mapping[str, Any]) -> str:
    """The name of a run with these values, in the order of the configuration's fields."""
    parts = [f"{name.replace('_', '-')}-{_text(fields[name])}" for name in FIELDS if name in fields]
    return "-".join(parts)


def _text(value: Any) -> str:
    """A value in lower case letters, digits and '-', without a point: 0.0012 is 12e-4."""
    if not isinstance(value, float):
        return str(value).lower()
    if value < 1e6 and value.is_integer():
        return str(int(value))
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    return f"{''.join(map(str, digits))}e{exponent}"
