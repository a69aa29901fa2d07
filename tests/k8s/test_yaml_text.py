"""The YAML that is written without PyYAML is PyYAML's."""

import random

import pytest
import yaml

from gptddp.k8s.render import yaml_text

ODD = [
    "yes", "y", "NO", "nO", "on", "~", "null", "NULL", "=", "<<", "1e3", "0x1", "1_0", "4Gi",
    "500m", "12Ei", "2026-01-01", "12:30", "-", "--", "---", "--- a", "--a", "-c", "a:b", "a: b",
    "a:", "a #b", "a#b", "inf", ".inf", "a  b", "a ", " a", "", "0", "00", "10", "+1", "-1", "1.5",
    "a'b", "'a", "!x 'y'", "@a", "%a", "`a", "[a]", "{a}", "a,b", "?a", "? a", "> a", "*a", "&a b",
    "r.io/g@sha256:0", "/x: y", "=a", "x" * 2000, "x y " * 300, "two\nlines", "\t", "\x1b[31m",
    "caf\u00e9", "\u2028",
]  # fmt: skip


def drawn(count=4000):
    random.seed(1)
    letters = "abYNo019 -:#'\"!&*|>%@`,[]{}?.=_/~+eE\\<\n\t\u00e9"
    return ["".join(random.choices(letters, k=random.randint(0, 7))) for _ in range(count)]


def by_pyyaml(*documents):
    return yaml.dump_all(
        documents, Dumper=yaml.CSafeDumper, sort_keys=False, default_flow_style=False,
        explicit_start=True, width=4096, allow_unicode=True,
    )  # fmt: skip


@pytest.mark.parametrize("texts", [ODD, drawn()], ids=["odd", "drawn"])
def test_every_text_is_written_as_pyyaml_writes_it(texts):
    """As a value, as a key, and in a list: plain, quoted or escaped alike."""
    for text in texts:
        for value in ({"k": text}, {text: 1}, {"k": [text, {"a": text, "b": 1}]}):
            assert yaml_text.dump([value]) == by_pyyaml(value), repr(text)
            assert yaml.safe_load(yaml_text.dump([value])) == value


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
