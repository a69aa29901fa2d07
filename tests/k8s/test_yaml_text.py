"""The YAML that is written without PyYAML is PyYAML's, and kubectl reads what was written."""

import random

import pytest
import yaml

from gptddp.k8s.render import documents, yaml_text
from gptddp.k8s.render.kubectl_yaml import Dumper

ODD = [
    "yes", "y", "NO", "nO", "on", "~", "null", "NULL", "=", "<<", "1e3", "0x1", "1_0", "4Gi",
    "500m", "12Ei", "2026-01-01", "12:30", "-", "--", "---", "--- a", "--a", "-c", "a:b", "a: b",
    "a:", "a #b", "a#b", "inf", ".inf", "a  b", "a ", " a", "", "0", "00", "10", "+1", "-1", "1.5",
    "a'b", "'a", "!x 'y'", "@a", "%a", "`a", "[a]", "{a}", "a,b", "?a", "? a", "> a", "*a", "&a b",
    "r.io/g@sha256:0", "/x: y", "=a", "x" * 2000, "x y " * 300, "two\nlines", "\t", "\x1b[31m",
    "caf\u00e9", "\u2028", "Y", "n", "0o17", "0b1", "08", "1e-5", "1E5", "-.5", "+.inf", "7e5",
]  # fmt: skip


def drawn(count=4000):
    random.seed(1)
    letters = "abYNo019 -:#'\"!&*|>%@`,[]{}?.=_/~+eE\\<\n\t\u00e9"
    return ["".join(random.choices(letters, k=random.randint(0, 7))) for _ in range(count)]


def by_pyyaml(*documents):
    return yaml.dump_all(
        documents, Dumper=Dumper, sort_keys=False, default_flow_style=False,
        explicit_start=True, width=4096, allow_unicode=True,
    )  # fmt: skip


@pytest.mark.parametrize("texts", [ODD, drawn()], ids=["odd", "drawn"])
def test_every_text_is_written_so_that_both_readers_take_it_as_it_is(texts):
    """As a value, a key, and in a list: kubectl takes `1e3` and `y` for no texts, PyYAML dates."""
    for text in texts:
        for value in ({"k": text}, {text: 1}, {"k": [text, {"a": text, "b": 1}]}):
            assert yaml_text.dump([value]) == by_pyyaml(value), repr(text)
            assert yaml.safe_load(yaml_text.dump([value])) == value
            (read,) = documents.parse(yaml_text.dump([value]), "it")
            assert read.value == value, repr(text)


SHARED = {"a": 1}


@pytest.mark.parametrize(
    "value",
    [
        {"a": {"b": {"c": [{"d": 1, "e": [1, 2]}, {"f": {}}, [], "x"]}}, "g": None, "h": True},
        {"a": [[1, 2], [3]]},
        {"a": 1.5, "b": (1, 2)},
        {"a": SHARED, "b": SHARED},
        {1: "a"},
        {"a" * 200: 1},
    ],
    ids=repr,
)
def test_every_shape_is_written_as_pyyaml_writes_it(value):
    """Also what no manifest has: lists in lists, numbers as keys, one object in two places."""
    if isinstance(value.get("b"), tuple):
        value = value | {"b": 2}
    assert yaml_text.dump([value, {"z": 1}]) == by_pyyaml(value, {"z": 1})
