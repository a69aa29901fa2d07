"""Shared by both programs: click's help, and the types of numbers and times."""

from collections.abc import Callable
from typing import Any

import click

from gptddp import amounts

# The context_settings of a group, and of its commands that another group also has: click keeps the
# help option of the first use.
HELP = {"help_option_names": ["-h", "--help"]}


class Summaries(click.Group):
    """A group whose help shows the whole summary of each command."""

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        cmd.short_help = (cmd.help or "").partition("\n")[0]  # click would cut it, not wrap it
        super().add_command(cmd, name)


class _AsWritten(click.ParamType[Any]):
    parse: Callable[[str], float]

    def convert(self, value: Any, *rest: Any) -> Any:
        try:
            return super().convert(self.parse(str(value)), *rest)
        except ValueError as error:
            self.fail(f"{str(value)[:60]!r}: {error}", *rest)


class Count(_AsWritten, click.IntRange):
    """A whole number such as 400, 10k, 1.5M or 1e3."""

    name, parse = "n", staticmethod(amounts.whole)


class Time(_AsWritten, click.FloatRange):
    """A length of time, in seconds: 90, 45s, 10m or 1h30m."""

    name, parse = "time", staticmethod(amounts.seconds)
