"""Shared by all commands of `gptddp-k8s`: errors as messages, notes on stderr."""

import contextlib
import errno
import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

import click

from gptddp.click_types import Summaries
from gptddp.errors import GptddpError, visible, visible_lines
from gptddp.flags import Groups, in_groups
from gptddp.k8s.exit_codes import BROKEN_PIPE, INTERRUPTED

TYPED = "gptddp.typed"  # key in the context's meta: the words typed after the command's name


class Command(click.Command):
    """A command whose arguments after `--` are the options of another program.

    owner: that program; takes: the names of its options; main: options of `--help`, by groups.
    """

    def __init__(
        self, *args: Any, owner: str, takes: Callable[[], list[str]], main: Groups, **settings: Any
    ) -> None:
        super().__init__(*args, **settings)
        self._owner, self._takes, self._main = owner, takes, main

    def get_help_option_names(self, ctx: click.Context) -> list[str]:
        return ["-h", "--help", "--help-all"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the main options by groups; with `--help-all`, all options."""
        everything = "--help-all" in ctx.meta.get(TYPED, ())
        options = {max(it.opts, key=len): it for it in self.get_params(ctx) if it.opts[0][0] == "-"}
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, (title, main) in in_groups(options, self._main).items():
            if (main or everything) and (record := options[name].get_help_record(ctx)):
                groups.setdefault(title, []).append(record)
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)
        formatter.write_paragraph()
        formatter.write_text(f"Options of {self._owner} follow after --.")
        formatter.write_text(f"`{ctx.command_path} --help-all` shows all options.")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[TYPED] = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            own = [name for param in self.params for name in (*param.opts, *param.secondary_opts)]
            meant = get_close_matches(error.option_name, [*own, *self._takes()], n=1)
            if not meant or meant[0] in own:
                raise
            gone = "" if meant[0] == error.option_name else f"there is no {error.option_name}; "
            raise click.UsageError(
                f"{gone}{meant[0]} is an option of {self._owner}: put it after --, as in "
                f"`{ctx.command_path} ... -- {meant[0]} ...`",
                ctx,
            ) from None


class Group(Summaries):
    """Turns our errors into a message on stderr and their exit code, without a traceback."""

    def main(self, *args: Any, **options: Any) -> Any:
        """Run the command line, and end the process with its exit code."""
        options["standalone_mode"] = False
        _open_what_is_closed()
        sys.exit(_exit_code(lambda: super(Group, self).main(*args, **options)))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        for arg in args:
            if any("\ud800" <= character <= "\udfff" for character in arg):
                raise click.UsageError(
                    f"{arg!r} is not UTF-8, which a manifest requires: type it again in UTF-8", ctx
                )
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        # click would handle every broken pipe itself, with another exit code
        ctx.exit(_exit_code(lambda: super(Group, self).invoke(ctx)))


def _exit_code(run: Callable[[], Any]) -> int:
    """Run a function that returns an exit code or None (0); print errors as messages."""
    try:
        return run() or 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        return _say_usage(error)
    except GptddpError as error:
        for line in visible_lines(error).split("\n"):
            _say(line if line.startswith(" ") else f"error: {line}")
        return error.exit_code
    except OSError as error:
        return _say_os_error(error)
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED


def _say_usage(error: click.ClickException) -> int:
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        _say(error.format_message())
        return error.exit_code
    _say(f"error: {visible_lines(error.format_message())}")
    if ctx := getattr(error, "ctx", None):
        _say(f"`{ctx.command_path} --help` shows its options")
    return error.exit_code


def _say_os_error(error: OSError) -> int:
    """Print the error and return the exit code; silent if the reader of stdout is gone."""
    if error.filename:
        _say(f"error: {error.strerror}: {visible(error.filename)}")
        return 1
    _forget(sys.stdout)
    if error.errno == errno.EPIPE:
        return BROKEN_PIPE
    _say(f"error: cannot write the output: {error.strerror or error}")
    return 1


def _say(text: str) -> None:
    try:
        click.echo(text, err=True)
    except OSError:  # the work continues without its terminal
        _forget(sys.stderr)


def _forget(stream: Any) -> None:
    """Drop the stream's buffered text, which Python would try to write again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_what_is_closed() -> None:
    """Replace a closed stdin, stdout or stderr: its use is an error, its descriptor is taken."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            other_way = os.O_WRONLY if mode == "r" else os.O_RDONLY
            os.dup2(os.open(os.devnull, other_way), number)
            setattr(sys, name, os.fdopen(number, mode, closefd=False))


def note(text: str) -> None:
    """Print a line for the user on stderr, apart from the data on stdout."""
    _say(visible_lines(text))
