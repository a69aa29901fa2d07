"""Types of arguments and options: names, times, files. An error states the rule."""

import re
from pathlib import Path
from typing import Any

import click

from gptddp.click_types import Time as Time  # exported with the other types


class _Name(click.ParamType[str]):
    """The name of an object of the API server, or of a local job."""

    name = "name"

    def __init__(self, what: str, most: int, dots: bool, prefix: str = "") -> None:
        """prefix: pattern of an optional prefix that is removed."""
        self._what, self._most, self._dots, self._prefix = what, most, dots, prefix

    def convert(self, value: Any, *rest: Any) -> str:
        part = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
        pattern = rf"{part}(\.{part})*" if self._dots else part
        text = re.sub(rf"\A(?:{self._prefix})", "", str(value))
        if not (re.fullmatch(pattern, text) and len(text) <= self._most):
            letters = "digits, '-' and '.'" if self._dots else "digits and '-'"
            self.fail(
                f"{text!r} cannot name {self._what}: use up to {self._most} lower case letters, "
                f"{letters}, with a letter or a digit at both ends",
                *rest,
            )
        return text


class _Word(click.ParamType[str]):
    """A text that is not empty (an unset shell variable would be)."""

    name = "text"

    def convert(self, value: Any, *rest: Any) -> str:
        if not str(value):
            self.fail("it is empty: give a value, or leave the option out", *rest)
        return str(value)


class _File(click.Path):
    """A file or folder, not opened here."""

    def convert(self, value: Any, *rest: Any) -> Any:
        return super().convert(WORD.convert(value, *rest), *rest)


# A job created by other programs may have dots. The prefix is the one that `-o name` prints.
JOB = _Name("a job", 253, dots=True, prefix=r"pytorchjobs?(\.kubeflow\.org)?/")
NAMESPACE = _Name("a namespace", 63, dots=False)
SECONDS = Time(0)
WORD = _Word()
PATH = _File(path_type=Path)
FILE = _File(path_type=Path, dir_okay=False)
FOLDER = _File(path_type=Path, file_okay=False)
