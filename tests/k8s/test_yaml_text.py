"""Written YAML means the same to PyYAML and Go, and reading gives one table."""

import re

import pytest
import yaml

from gptddp.k8s.render import yaml_text

ODD = [
    "yes", "y", "NO", "nO", "on", "~", "null", "NULL", "=", "<<", "1e3", "0x1", "1_0", "4Gi",
    "500m", "12Ei", "2026-01-01", "12:30", "-", "--", "---", "--- a", "--a", "-c", "a:b", "a: b",
    "a:", "a #b", "a#b", "inf", ".inf", "a  b", "a ", " a", "", "0", "00", "10", "+1", "-1", "1.5",
    "a'b", "'a", "!x 'y'", "@a", "%a", "`a", "[a]", "{a}", "a,b", "?a", "? a", "> a", "*a", "&a b",
    "r.io/g@sha256:0", "/x: y", "=a", "x" * 2000, "x y " * 300, "two\nlines", "\t", "\x1b[31m",
    "caf\u00e9", "\u2028", "Y", "n", "0o17", "0b1", "08", "1e-5", "1E5", "-.5", "+.inf", "7e5",
]  # fmt: skip
# Texts that Go's YAML reads as numbers or truth values if they are plain, though PyYAML does not.
GO_WORDS = ["1e3", "7e5", "1E5", "123e456", "0o17", "-0o7", "1.e3", "+5_0", "y", "Y", "n", "N"]
PLAIN = ["500m", "4Gi", "gptddp:0.2.0", "12ab34", "1.2.3", "yn", "1 e3"]


def test_every_text_is_read_as_it_was_written():
    """PyYAML and our reader read each odd text back, as a value, as a key and in a list."""
    for text in ODD:
        for value in ({"k": text}, {text: 1}, {"k": [text, {"a": text, "b": 1}]}):
            written = yaml_text.dump([value])
            assert yaml.safe_load(written) == yaml_text.load(written) == value, repr(text)


@pytest.mark.parametrize(("texts", "quote"), [(GO_WORDS, "'"), (PLAIN, "")])
def test_a_text_that_go_reads_as_something_else_is_quoted(texts, quote):
    """Without quotes the API server would refuse the job, with a number in place of a text. Other
    texts have no quotes."""
    for text in texts:
        assert yaml_text.dump([{"k": text}]) == f"---\nk: {quote}{text}{quote}\n"


def test_the_yaml_has_no_anchors():
    """An object that is used twice is written twice: some tools cannot read anchors."""
    shared = {"a": 1}
    assert yaml_text.dump([{"x": shared, "y": shared}]) == "---\nx:\n  a: 1\n'y':\n  a: 1\n"


def test_times_and_dates_are_texts():
    """kubectl reads them so too; YAML 1.1 reads 12:30 as the number 750."""
    found = yaml_text.load(
        "\na: [12:30, 2026-01-01, 0440, 0x10, 1.5, yes, null, 1e3]\n2: &x b\nc: *x"
    )
    assert found == {
        "a": ["12:30", "2026-01-01", 288, 16, 1.5, True, None, "1e3"],
        "2": "b",
        "c": "b",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "is not YAML: line 2: did not find"),
        ("a: 1\nb: 2\na: 3", "line 3: a is in line 1 and again"),
        ("- a", "has no table: it must have one"),
        ("a: 1\n---\nb: 2", "has 2 objects"),
        ("", "has 0 objects"),
        ("a: !!int x", "is not YAML: invalid literal"),
        ("a: &x [*x]", "JSON does not have"),
        ("a: !!timestamp 2026-01-01", "put dates"),
        ("a: \x00", "control characters are not allowed"),
        ("a: !!python/name:os.system", "could not determine a constructor"),
        ("{[1]: 2}", "unhashable key"),
    ],
)
def test_a_text_that_is_no_table_is_refused(text, message):
    """The message has the line, if known, and the error there."""
    with pytest.raises(ValueError, match=re.escape(message)):
        yaml_text.load(text)
