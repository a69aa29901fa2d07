"""Which files of a folder are left out: the patterns of an ignore file, as git reads them.

A line a pattern; `#` opens a comment, `!` takes back what an earlier line has left out, a slash at
the end is for folders only, one elsewhere ties the pattern to the top, `**` stands for any folders.
The last pattern that fits counts. What lies in a folder that is left out cannot be taken back.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from gptddp.errors import ConfigError

FILE = ".gptddpignore"
# Hidden files: .git, .venv and the caches of tools, but also .env and .netrc, which hold secrets.
DEFAULT = (".*", "__pycache__/", "*.py[cod]", "*.egg-info/", "venv/", "node_modules/")


@dataclass(frozen=True)
class _Pattern:
    regex: re.Pattern[str]
    out: bool  # left out, or taken back
    folders_only: bool


class Ignore:
    """The patterns of a folder: those of every folder, then its own."""

    def __init__(self, lines: list[str], where: str = FILE) -> None:
        """Raises ConfigError for a line that is no pattern."""
        self._patterns = [it for line in DEFAULT if (it := _parsed(line))]
        for number, line in enumerate(lines, 1):
            try:
                found = _parsed(line)
            except re.error as error:
                raise ConfigError(
                    f"{where}, line {number}: {line!r} is no pattern ({error}); put a backslash "
                    "before a character that is meant as it is"
                ) from None
            self._patterns += [found] if found else []

    @classmethod
    def of(cls, folder: Path) -> "Ignore":
        """The patterns of a folder and its ignore file. Raises ConfigError, OSError."""
        path = folder / FILE
        try:
            return cls(path.read_text("utf-8-sig").split("\n"), str(path))
        except FileNotFoundError:
            return cls([])
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not UTF-8 ({error}): save it as such") from None

    def leaves_out(self, path: str, is_folder: bool) -> bool:
        """Is this path, relative to the folder and with slashes, left out by the last that fits?

        As with git, no pattern takes `.git` back: `!.*` is meant for other hidden files.
        """
        if path.rpartition("/")[2] == ".git":
            return True
        for pattern in reversed(self._patterns):
            if (is_folder or not pattern.folders_only) and pattern.regex.fullmatch(path):
                return pattern.out
        return False


def _parsed(line: str) -> _Pattern | None:
    """A line as a pattern; None for one that has none. Raises re.error."""
    text = re.sub(r"(?<!\\) +$", "", line.removesuffix("\r"))
    out = not text.startswith("!")
    text = text if out else text[1:]
    if not text or (out and text.startswith("#")):
        return None
    folders_only, text = text.endswith("/"), text.removesuffix("/")
    anywhere = "/" not in text
    return _Pattern(
        re.compile(("(?:.*/)?" if anywhere else "") + _regex(text.removeprefix("/")), re.DOTALL),
        out,
        folders_only,
    )


_TOKEN = re.compile(
    r"(?P<top>^\*\*/)|(?P<middle>/\*\*/)|(?P<below>/\*\*$)|(?P<star>\*+)|(?P<one>\?)"
    r"|\[(?P<set>[!^]?\]?(?:\\.|\[:[a-z]+:\]|[^\]\\])*)\]|\\(?P<escaped>.)|(?P<plain>.)",
    re.DOTALL,
)
_MEANS = {"top": "(?:.*/)?", "middle": "/(?:.*/)?", "below": "/.*", "star": "[^/]*", "one": "[^/]"}
# In a set: a class of characters by its name, what is after a backslash, what means more to re.
_IN_SET = re.compile(r"\[:([a-z]+):\]|(\\.)|([\[\]&~|^])", re.DOTALL)
_CLASSES = {
    "alnum": "a-zA-Z0-9",
    "alpha": "a-zA-Z",
    "blank": " \\t",
    "cntrl": "\\x00-\\x1f\\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": "!-/:-@\\[-`{-~",
    "space": "\\s",
    "upper": "A-Z",
    "xdigit": "0-9a-fA-F",
}


def _regex(pattern: str) -> str:
    parts = []
    for token in _TOKEN.finditer(pattern):
        kind, text = str(token.lastgroup), str(token[str(token.lastgroup)])
        if kind == "set":
            others = "^" if text.startswith(("!", "^")) else ""
            body = text[1:] if others else text
            body = _IN_SET.sub(_in_set, body)
            parts.append(f"(?!/)[{others}{body}]")
        else:
            parts.append(_MEANS.get(kind) or re.escape(text))
    return "".join(parts)


def _in_set(match: re.Match[str]) -> str:
    """A part of a set as re writes it. Raises re.error."""
    name, escaped, special = match.groups()
    if name and name not in _CLASSES:
        raise re.error(f"there is no class [:{name}:]")
    return _CLASSES[name] if name else escaped or "\\" + special
