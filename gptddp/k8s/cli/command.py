"""What all commands of `gptddp-k8s` have in common: errors as messages, notes on stderr."""

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

import click

from gptddp import config
from gptddp.errors import GptddpError, visible_lines


class Command(click.Command):
    """A command whose arguments after `--` are the trainer's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            if name in config.FIELDS:
                raise click.UsageError(
                    f"{error.option_name} is an option of the trainer: put it after --, as in "
                    f"`gptddp-k8s {ctx.info_name} ... -- {error.option_name} ...`"
                ) from None
            raise


class Group(click.Group):
    """Turns our errors into a message on stderr and their exit code; no traceback.

    A command is loaded when it is asked for: its options cost a millisecond.
    """

    modules: Mapping[str, str] = {}  # command: module of this package that has it in COMMANDS

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self.modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.modules:
            return None
        module = importlib.import_module(f"gptddp.k8s.cli.{self.modules[cmd_name]}")
        found: Sequence[click.Command] = module.COMMANDS
        return next(command for command in found if command.name == cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GptddpError as error:
            for line in visible_lines(error).split("\n"):
                click.echo(line if line.startswith(" ") else f"error: {line}", err=True)
            ctx.exit(error.exit_code)
        except KeyboardInterrupt:
            from gptddp.k8s.exit_codes import INTERRUPTED

            ctx.exit(INTERRUPTED)


def note(text: str) -> None:
    """A line for the person at the terminal, apart from the data on stdout."""
    click.echo(visible_lines(text), err=True)
