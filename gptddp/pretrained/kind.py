"""What a `model_type` of Hugging Face's transformers is, to our model."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gptddp.config import Config


@dataclass(frozen=True)
class Kind:
    """One `model_type` of a config.json, and what it is in our model.

    fields: from a config.json to the fields of ours that it decides. config: the inverse, of the
    model alone. parts: the fields that a model of ours must have for it. names: of a parameter of
    ours in the file; several are its rows, one below the other. transposed: is it there? ones: the
    weights, with their sizes, that our model has not, and that are 1 in it. prefix: of all names
    but that of the head, which some files leave out. ignored: names in a file that are no weights.
    head: the output projection, which is also written where it is the embedding.
    """

    model_type: str
    architecture: str
    parts: Mapping[str, Any]
    fields: Callable[[Mapping[str, Any]], dict[str, Any]]
    config: Callable[[Config], dict[str, Any]]
    names: Callable[[str], tuple[str, ...]]
    prefix: str
    transposed: Callable[[str], bool] = lambda _: False
    ones: Callable[[Config], dict[str, int]] = lambda _: {}
    ignored: re.Pattern[str] = re.compile("")
    head: str = "lm_head.weight"


def rows(shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The rows of each of the matrices in one of ours: queries, keys and values, or equal parts."""
    if count == 3:
        keys = (shape[0] - shape[1]) // 2
        return shape[1], keys, keys
    return (shape[0] // count,) * count
