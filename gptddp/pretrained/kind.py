"""The mapping between a `model_type` of Hugging Face's transformers and our model."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gptddp.config import Config


@dataclass(frozen=True)
class Kind:
    """One `model_type` of a config.json, and its mapping to our model.

    fields: from a config.json to our fields. config: the inverse, for the model only. parts: fixed
    values of our fields. names: from our parameter to its names in the file; several names are
    matrices stacked in our parameter. transposed: is it transposed in the file? ones: weights that
    our model does not have and that are all 1, with their sizes. prefix: of all names except the
    head's; some files omit it. ignored: names in a file that are no weights. head: the output
    projection; it is also written if it is tied to the embedding.
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
    """The heights of matrices stacked in one of ours: queries, keys, values; or equal parts."""
    if count == 3:
        keys = (shape[0] - shape[1]) // 2
        return shape[1], keys, keys
    return (shape[0] // count,) * count
