"""What the values of arguments and options are: names, times, files. A mistake is told its rule."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def completed(what: str) -> Completer:
    """Completion by a function of `complete`, which is loaded when it is asked."""

    def ask(ctx: click.Context, param: click.Parameter, start: str) -> list[str]:
        from gptddp.k8s.cli import complete

        found: list[str] = getattr(complete, what)(ctx, param, start)
        return found

    return ask


class _Name(click.ParamType[str]):
    """The name of an object that the API server, or a folder of local jobs, is asked for."""

    name = "name"

    def __init__(self, what: str, most: int, dots: bool, prefix: str = "") -> None:
        """prefix: pattern of what may stand before it and is not of the name."""
        self._what, self._most, self._dots, self._prefix = what, most, dots, prefix

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        import re

        part = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
        pattern = rf"{part}(\.{part})*" if self._dots else part
        text = re.sub(rf"\A(?:{self._prefix})", "", str(value))
        if not (re.fullmatch(pattern, text) and len(text) <= self._most):
            letters = (
                "lower case letters, digits, '-' and '.'"
                if self._dots
                else ("lower case letters, digits and '-'")
            )
            self.fail(
                f"{text!r} cannot name {self._what}: use up to {self._most} {letters}, with a "
                "letter or a digit at both ends",
                param,
                ctx,
            )
        return text


class _Number(click.ParamType[float]):
    """A finite number of a range, which `rule` says; `fix`: an example."""

    def __init__(self, name: str, least: float, most: float, rule: str, fix: str) -> None:
        self.name, self._least, self._most = name, least, most
        self._rule, self._fix = rule, fix

    def convert(self, value: Any, *rest: Any) -> float:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not (self._least <= number <= self._most) or math.isinf(number):
            self.fail(f"{value!r} is {self._rule}: {self._fix}", *rest)
        return number


class _Duration(click.ParamType[float]):
    """A length of time as kubectl takes it, in seconds."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        import re

        number = r"(\d+(?:\.\d*)?|\.\d+)"
        match = re.fullmatch(rf"(?:{number}h)?(?:{number}m)?(?:{number}s)?", str(value))
        parts = [float(part or 0) for part in match.groups()] if match else []
        if not sum(parts):
            self.fail(
                f"{value!r} is no length of time: write it as in 45s, 10m or 1h30m", param, ctx
            )
        hours, minutes, seconds = parts
        return 3600 * hours + 60 * minutes + seconds


class _Word(click.ParamType[str]):
    """A text that is not empty, as that of a shell variable that is not set is."""

    name = "text"

    def convert(self, value: Any, *rest: Any) -> str:
        if not str(value):
            self.fail("it is empty: give a value, or leave the option out", *rest)
        return str(value)


class _File(click.Path):
    """A file or folder, which is not looked at here."""

    def convert(self, value: Any, *rest: Any) -> Any:
        return super().convert(WORD.convert(value, *rest), *rest)


# A job that we did not create may have dots; `-o name` says what it is as well, as kubectl does.
JOB = _Name("a job", 253, dots=True, prefix=r"pytorchjobs?(\.kubeflow\.org)?/")
NAMESPACE = _Name("a namespace", 63, dots=False)
SECONDS = _Number(
    "seconds",
    0,
    math.inf,
    "no time",
    "use seconds from 0 on, such as 90; without a limit, leave it out",
)
TEMPERATURE = _Number("number", 0, math.inf, "no temperature", "use 0 or more, such as 0.8")
PROBABILITY = _Number("number", 1e-9, 1, "no probability", "use more than 0, up to 1")
DURATION = _Duration()
WORD = _Word()
PATH = _File(path_type=Path)
FILE = _File(path_type=Path, dir_okay=False)
FOLDER = _File(path_type=Path, file_okay=False)
