"""What --help shows, at 80 columns."""

import re
import subprocess
import sys

import pytest
from click.testing import CliRunner
from support.paths import ROOT

from gptddp.cli import cli
from gptddp.config import FIELDS
from gptddp.flags import MAIN, flag
from gptddp.k8s.cli.main import cli as k8s_cli
from gptddp.prepare.commands import prepare

PROGRAMS = {"gptddp": cli, "gptddp-k8s": k8s_cli}
COMMANDS = [(name, command) for name, it in PROGRAMS.items() for command in it.commands]
LONG = ["submit", "render", "doctor", "prepare"]  # those of gptddp-k8s with main options


def shown(program: str, *args: str, columns: int = 80) -> str:
    """What the program prints for these arguments on a terminal of so many columns."""
    env = {"COLUMNS": str(columns)}
    width = {"terminal_width": columns}  # else it is 80 for click, whatever COLUMNS says
    result = CliRunner(env=env).invoke(PROGRAMS[program], args, prog_name=program, **width)
    assert result.exit_code == 0
    return result.stdout


def options(text: str) -> list[str]:
    """The options that have a line in a help."""
    return [
        it
        for line in re.findall(r"^  (-.*)", text, re.M)
        for it in re.findall(r"--[\w-]+", line.split("   ")[0])
    ]


@pytest.mark.parametrize(("program", "name"), COMMANDS)
def test_a_summary_is_a_whole_sentence_and_the_help_fits(program, name):
    """No summary of a command is cut, none takes two lines, and no line is wider."""
    summary = re.search(rf"^  {name} +(\S.*)$", shown(program, "--help"), re.M)
    assert summary and summary[1].endswith(".") and not summary[1].endswith("...")
    assert len(summary[0]) <= 80
    text = shown(program, name, "--help")
    assert summary[1] in text or name == "train"
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_narrow_terminal_wraps_a_summary(program):
    """It is never cut: at 60 columns every word of it is there."""
    narrow, wide = (shown(program, "--help", columns=it) for it in (60, 200))
    assert "..." not in narrow.partition("Commands:")[2]
    assert narrow.split() == wide.split()


@pytest.mark.parametrize(("program", "name"), COMMANDS)
def test_h_is_for_help(program, name):
    """Of every command, as of `gptddp train`; also where another program has used it before."""
    prepare.make_context("prepare", [".", "--out", "."])
    run = CliRunner().invoke(PROGRAMS[program], [name, "-h"], prog_name=program)
    assert run.exit_code == 0 and run.stdout.lower().startswith("usage: ")


def test_the_help_of_train_has_what_people_set_and_the_other_help_has_everything():
    """Some 20 fields in groups, each with its default; --help-all has every field once, in the
    same groups."""
    text, everything = shown("gptddp", "train", "--help"), shown("gptddp", "train", "--help-all")
    main = [flag(name) for names in MAIN.values() for name in names]
    own = ["--config", "--help", "--help-all"]
    assert options(text) == [*main, *own] and 18 <= len(main) <= 25
    assert options(everything) == [*map(flag, FIELDS), *own]
    assert "as in 0.9,0.95 (default: 0.9,0.95)" in " ".join(everything.split())  # as it is given
    titles = [f"{title}:" for title in (*MAIN, "this command")]
    for it in (text, everything):
        assert re.findall(r"^[\w ]+:$", it, re.M) == titles
        words = " ".join(it.split())
        assert "attention heads (default: tiny 4, gpt2 12)" in words
        assert "--checkpoint-every TIME seconds between checkpoints (default: 60.0)" in words
        assert words.endswith("--help-all shows all options")


@pytest.mark.parametrize("name", LONG)
def test_a_command_of_many_options_shows_those_that_people_set(name):
    """The rest with --help-all, which has every option once, each group in one place."""
    command = k8s_cli.commands[name]
    known = [max(it.opts, key=len) for it in command.params if it.param_type_name == "option"]
    text, everything = shown("gptddp-k8s", name, "--help"), shown("gptddp-k8s", name, "--help-all")
    assert sorted(options(everything)) == sorted([*known, "--help", "--help-all"])
    assert set(options(text)) < set(options(everything)) and len(options(text)) <= 25
    assert f"`gptddp-k8s {name} --help-all` shows all options." in text
    assert text.index("--name") < text.index("Cluster requirements:")
    assert "--toleration" in everything and "--toleration" not in text


def test_each_option_that_submit_shows_is_one():
    """A name in a group that no option has is a mistake."""
    from gptddp.k8s.cli.spec_commands import MAIN as OF_A_JOB

    named = [name for names in OF_A_JOB.values() for name in names]
    assert sorted(named) == sorted(
        set(options(shown("gptddp-k8s", "submit", "--help"))) - {"--help"}
    )


def test_the_package_is_the_command():
    """`python -m gptddp` is gptddp, and its usage says how it was called."""
    run = [sys.executable, "-m", "gptddp"]
    found = subprocess.run([*run, "train", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0 and found.stdout.startswith("usage: python -m gptddp train [")
    found = subprocess.run([*run, "trian"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 2 and "Usage: python -m gptddp [OPTIONS] COMMAND" in found.stderr
