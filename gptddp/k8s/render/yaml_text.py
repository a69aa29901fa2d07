"""Objects as YAML that kubectl reads as they are: PyYAML's bytes, mostly without loading it.

Loading PyYAML takes longer than writing a job. What is not plain enough to be sure of, such as a
text of several lines, is left to it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

_WORDS = frozenset(  # with a meaning of their own
    form
    for word in ("yes", "no", "true", "false", "on", "off", "null", "y", "n")
    for form in (word, word.capitalize(), word.upper())
)
_MOST_CHARACTERS = 1000  # of a text that is surely in one line
_TEXT = re.compile(r"[!-~]([ -~]*[!-~])?")  # printable, and no space at an end
# Of any other text that begins with a digit, a sign or a dot, PyYAML says whether it is a number.
_PLAIN = re.compile(r"-{0,2}[A-Za-z/_][A-Za-z0-9_./@+=:-]*(?<!:)|[1-9][0-9]*(m|[kMGTPE]i?)")
_NUMBER = re.compile(r"0|[1-9][0-9]*")
_QUOTED_FIRST = frozenset("!&*|>'\"%@`#,[]{}")


class _NotPlain(Exception):
    """PyYAML has to say what this is written as."""


def dump(documents: Iterable[Mapping[str, Any]]) -> str:
    """One document an object, each opened by `---`; block style, keys as they are."""
    documents = list(documents)
    try:
        seen: set[int] = set()
        lines = [line for it in documents for line in ("---", *_table(it, "", seen))]
    except _NotPlain:
        return _by_pyyaml(documents)
    return "\n".join([*lines, ""])


def _by_pyyaml(documents: list[Mapping[str, Any]]) -> str:
    import yaml

    from gptddp.k8s.render.kubectl_yaml import Dumper

    return str(
        yaml.dump_all(
            documents,
            Dumper=Dumper,
            sort_keys=False,
            default_flow_style=False,
            explicit_start=True,
            width=4096,
            allow_unicode=True,
        )
    )


def _table(table: Mapping[str, Any], indent: str, seen: set[int]) -> Iterator[str]:
    _once(table, seen)
    if type(table) is not dict or not table:
        raise _NotPlain
    for key, value in table.items():
        if type(key) is not str or len(key) > 100:
            raise _NotPlain
        yield from _entry(f"{indent}{_text(key)}:", value, indent, seen)


def _entry(head: str, value: Any, indent: str, seen: set[int]) -> Iterator[str]:
    """`head` with what belongs to it; a list is not indented."""
    if type(value) is dict and value:
        yield head
        yield from _table(value, indent + "  ", seen)
    elif type(value) is list and value:
        _once(value, seen)
        yield head
        for item in value:
            if type(item) is dict and item:
                first, *rest = _table(item, indent + "  ", seen)
                yield f"{indent}- {first.removeprefix(indent + '  ')}"
                yield from rest
            else:
                yield f"{indent}- {_scalar(item, seen)}"
    else:
        yield f"{head} {_scalar(value, seen)}"


def _once(value: Any, seen: set[int]) -> None:
    """What is in two places would be an anchor."""
    if id(value) in seen:
        raise _NotPlain
    seen.add(id(value))


def _scalar(value: Any, seen: set[int]) -> str:
    kind = type(value)
    if kind is str:
        return _text(value)
    if value is None or kind is bool:
        return {None: "null", True: "true", False: "false"}[value]
    if kind is int:
        return str(value)
    if kind in (dict, list) and not value:
        _once(value, seen)
        return "{}" if kind is dict else "[]"
    raise _NotPlain


def _text(text: str) -> str:
    if _PLAIN.fullmatch(text) and len(text) <= _MOST_CHARACTERS:
        return f"'{text}'" if text in _WORDS else text
    if not _TEXT.fullmatch(text) or len(text) > _MOST_CHARACTERS:
        raise _NotPlain
    if _NUMBER.fullmatch(text) or text[0] in _QUOTED_FIRST:
        return "'" + text.replace("'", "''") + "'"
    if text[0].isalpha() and ": " not in text and " #" not in text and text[-1] != ":":
        return text  # words, with a space at least
    raise _NotPlain
