"""The objects of YAML and JSON files, each with its lines, read as kubectl reads them."""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import yaml

from gptddp.errors import ConfigError
from gptddp.k8s.render.kubectl_yaml import Loader
from gptddp.k8s.render.problem import Problem

SUFFIXES = (".yaml", ".yml", ".json")
STDIN = "-"
_MOST_NODES = 200_000  # with what is repeated by aliases: a manifest has some hundreds
_DEEPEST = 200  # PyYAML's C library makes the process crash where it is nested too deep
_SURROGATES = r"\\\\|\\u([dD][89abAB]..)\\u([dD][c-fC-F]..)"  # JSON's 😀; YAML knows no halves


class Document:
    """One object of a file, which begins in line `first`; `problems`: those of reading it."""

    def __init__(self, file: str, node: Any, first: int, problems: Iterable[Problem] = ()) -> None:
        self.file, self.node, self.first = file, node, first
        self.problems = list(problems)
        self.value: Any = None

    def line(self, path: str) -> int:
        """The line of a field, such as `spec.containers[0].name`, or of the nearest around it."""
        return self._find(path)[0]

    def word(self, path: str) -> str:
        """What stands there as it is written, where it is one value; else nothing."""
        node = self._find(path)[1]
        return str(node.value) if isinstance(node, yaml.ScalarNode) else ""

    def _find(self, path: str) -> tuple[int, Any]:
        node, line = self.node, self.first
        for part in re.findall(r"\[[^\]]*\]|[^.\[\]]+", path):
            mark, node = _child(node, part)
            if node is None:
                break
            line = mark.start_mark.line + 1
        return line, node


def files(path: Path, recursive: bool = False) -> list[Path]:
    """A file, or those of a folder that are YAML or JSON, by name. Raises ConfigError for none."""
    if not path.is_dir():
        return [path]
    found = sorted(path.rglob("*") if recursive else path.iterdir())
    found = [it for it in found if it.suffix in SUFFIXES and it.is_file()]
    if not found:
        deeper = "" if recursive else ", or add -R for its folders"
        raise ConfigError(
            f"-f {path}: the folder has no file that ends in {', '.join(SUFFIXES)}: name the file"
            f" itself{deeper}"
        )
    return found


def read_text(path: Path) -> str:
    """A file's text, or with `-` what stdin has. Raises ConfigError."""
    try:
        data = sys.stdin.buffer.read() if str(path) == STDIN else path.read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"-f {path}: cannot be read: {error.strerror}; name another") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"-f {path}: byte {error.start} is not UTF-8: save the file as UTF-8"
        ) from None


def parse(text: str, file: str) -> Iterator[Document]:
    """The objects of a text, those of a List one by one; the last may be what cannot be read."""
    for part in _parts(text):
        yield from _parse(part, file)


def _parts(text: str) -> Iterator[str]:
    """The objects of JSON that a text begins with, one after the other, and then YAML.

    Each part begins with as many lines as stand before it.
    """
    end, decode = 0, json.JSONDecoder().raw_decode
    while (begin := re.compile(r"\s*").match(text, end).end()) < len(text):  # type: ignore[union-attr]
        try:
            after = decode(text, begin)[1] if text[begin] == "{" else 0
        except (ValueError, RecursionError):
            after = 0
        if not after:
            break
        yield "\n" * text.count("\n", 0, begin) + re.sub(_SURROGATES, _joined, text[begin:after])
        end = after
    yield "\n" * text.count("\n", 0, end) + text[end:]


def _joined(match: re.Match[str]) -> str:
    high, low = match.groups()
    if not high:
        return match[0]
    return f"\\U{0x10000 + (int(high, 16) - 0xD800) * 0x400 + int(low, 16) - 0xDC00:08x}"


def _parse(text: str, file: str) -> Iterator[Document]:
    if _is_deep(text):
        yield _unreadable(file, 1, "it is nested too deep", "is this a manifest?")
        return
    loader = Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            yield from _objects(loader, node, file)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        yield _unreadable(
            file, (mark.line + 1 if mark else 1), str(error.problem), _hint(text, error)
        )
    except yaml.YAMLError as error:
        yield _unreadable(file, 1, " ".join(str(error).split()), "write plain text, as UTF-8")
    except ValueError as error:  # `!!int x`
        yield _unreadable(file, 1, str(error), _hint(text, error))
    finally:
        loader.dispose()


def _is_deep(text: str) -> bool:
    depth = 0
    try:
        for event in yaml.parse(text, Loader=Loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > _DEEPEST:
                return True
    except yaml.YAMLError:
        pass  # it is said where it is read
    return False


def _objects(loader: Any, node: Any, file: str) -> Iterator[Document]:
    made = Document(file, node, node.start_mark.line + 1)
    if _size(node, {}) > _MOST_NODES:
        rule = "its aliases repeat too much, or themselves"
        made.problems.append(Problem("yaml", "document", rule, "write it without them"))
        yield made
        return
    made.problems += _doubles(node, ())
    made.value = _plain(loader.construct_document(node))
    if isinstance(made.value, dict) and str(made.value.get("kind", "")).endswith("List"):
        _, items = _child(node, "items")
        if isinstance(made.value.get("items"), list) and isinstance(items, yaml.SequenceNode):
            for item, value in zip(items.value, made.value["items"], strict=True):
                one = Document(file, item, item.start_mark.line + 1, made.problems)
                one.value = value
                made.problems.clear()
                yield one
            return
    if made.value is not None:
        yield made


def _unreadable(file: str, line: int, what: str, fix: str) -> Document:
    return Document(file, None, line, [Problem("yaml", "document", what, fix)])


def _hint(text: str, error: Exception) -> str:
    """What to do about a text that is no YAML."""
    if "expected <document start>" in str(error):
        return "kubectl would leave out the rest without a word: indent it, or write --- before it"
    if "{{" in text:
        return "it looks like a template: render it first, as with `helm template`"
    if re.search(r"^\s*\t", text, re.M):
        return "indent with spaces: YAML takes no tabs"
    return "correct its YAML there, or in the line above"


def _plain(value: Any) -> Any:
    """With keys that are strings, as in JSON."""
    if isinstance(value, dict):
        return {_key(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _key(key: Any) -> str:
    if key is None:
        raise yaml.constructor.ConstructorError(None, None, "a key is null", None)
    return str(key).lower() if isinstance(key, bool) else str(key)


def _child(node: Any, part: str) -> tuple[Any, Any]:
    """Of a key, `[index]` or `[name]` below a node: the node it begins with, and its value."""
    word = part.strip("[]")
    if isinstance(node, yaml.MappingNode):
        merged = (_child(value, part) for name, value in node.value if name.value == "<<")
        own = ((name, value) for name, value in reversed(node.value) if name.value == word)
        return next(own, None) or next((it for it in merged if it[1]), (None, None))
    if isinstance(node, yaml.SequenceNode) and word.isdigit():
        item = node.value[int(word)] if int(word) < len(node.value) else None
        return item, item
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            if getattr(_child(item, "name")[1], "value", None) == word:
                return item, item
    return None, None


def _size(node: Any, known: dict[int, int]) -> int:
    """The nodes of a tree, those of an alias each time; beyond the most for one within itself."""
    if id(node) not in known:
        known[id(node)] = _MOST_NODES + 1  # while it is being counted
        below: list[Any] = []
        if isinstance(node, yaml.MappingNode):
            below = [it for pair in node.value for it in pair]
        elif isinstance(node, yaml.SequenceNode):
            below = node.value
        known[id(node)] = 1 + sum(_size(it, known) for it in below)
    return known[id(node)]


def _doubles(node: Any, path: tuple[str, ...]) -> Iterator[Problem]:
    """Keys that stand twice in one object."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _doubles(item, (*path, f"[{index}]"))
    elif isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name = str(key.value)
            here = (*path, name if re.fullmatch(r"[\w-]+", name) else f"[{name}]")
            if name in seen and name != "<<":
                field = ".".join(here).replace(".[", "[")
                rule = f"stands in line {seen[name]} and again in line {key.start_mark.line + 1}"
                yield Problem("duplicate-key", field, rule, "remove one of them")
            seen.setdefault(name, key.start_mark.line + 1)
            yield from _doubles(value, here)
