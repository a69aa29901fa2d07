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
LONG = ["submit", "render", "doctor", "prepare"]  # commands of gptddp-k8s that have main options


def shown(program: str, *args: str, columns: int = 80) -> str:
    """The output of the program for these arguments on a terminal of this width."""
    env = {"COLUMNS": str(columns)}
    width = {"terminal_width": columns}  # without it click takes 80, whatever COLUMNS says
    result = CliRunner(env=env).invoke(PROGRAMS[program], args, prog_name=program, **width)
    assert result.exit_code == 0
    return result.stdout


def options(text: str) -> list[str]:
    """The options that a help text lists."""
    return [
        it
        for line in re.findall(r"^  (-.*)", text, re.M)
        for it in re.findall(r"--[\w-]+", line.split("   ")[0])
    ]


@pytest.mark.parametrize(("program", "name"), COMMANDS)
def test_a_summary_is_a_whole_sentence_and_the_help_fits(program, name):
    """No summary is cut or takes two lines, and no line of help is wider than 80 columns."""
    summary = re.search(rf"^  {name} +(\S.*)$", shown(program, "--help"), re.M)
    assert summary and summary[1].endswith(".") and not summary[1].endswith("...")
    assert len(summary[0]) <= 80
    text = shown(program, name, "--help")
    assert summary[1] in text or name == "train"
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_narrow_terminal_wraps_a_summary(program):
    """At 60 columns every word of a summary is there."""
    narrow, wide = (shown(program, "--help", columns=it) for it in (60, 200))
    assert "..." not in narrow.partition("Commands:")[2]
    assert narrow.split() == wide.split()


@pytest.mark.parametrize(("program", "name"), COMMANDS)
def test_h_is_for_help(program, name):
    """Every command has `-h`, even after another program has used that command."""
    prepare.make_context("prepare", [".", "--out", "."])
    run = CliRunner().invoke(PROGRAMS[program], [name, "-h"], prog_name=program)
    assert run.exit_code == 0 and run.stdout.lower().startswith("usage: ")


def test_help_of_train_has_the_main_options_and_help_all_has_all():
    """--help shows some 20 fields in groups, each with its default. --help-all has every field
    once, in the same groups."""
    text, everything = shown("gptddp", "train", "--help"), shown("gptddp", "train", "--help-all")
    main = [flag(name) for names in MAIN.values() for name in names]
    own = ["--config", "--help", "--help-all"]
    assert options(text) == [*main, *own] and 18 <= len(main) <= 25
    assert options(everything) == [*map(flag, FIELDS), *own]
    assert "as in 0.9,0.95 (default: 0.9,0.95)" in " ".join(everything.split())  # as users write it
    titles = [f"{title}:" for title in (*MAIN, "this command")]
    for it in (text, everything):
        assert re.findall(r"^[\w ]+:$", it, re.M) == titles
        words = " ".join(it.split())
        assert "attention heads (default: tiny 4, gpt2 12)" in words
        assert "--checkpoint-every TIME seconds between checkpoints (default: 60.0)" in words
        assert words.endswith("--help-all shows all options")


@pytest.mark.parametrize("name", LONG)
def test_a_command_with_many_options_shows_the_main_ones(name):
    """--help shows the main options; --help-all has every option once, each group in one place."""
    command = k8s_cli.commands[name]
    known = [max(it.opts, key=len) for it in command.params if it.param_type_name == "option"]
    text, everything = shown("gptddp-k8s", name, "--help"), shown("gptddp-k8s", name, "--help-all")
    assert sorted(options(everything)) == sorted([*known, "--help", "--help-all"])
    assert set(options(text)) < set(options(everything)) and len(options(text)) <= 25
    assert f"`gptddp-k8s {name} --help-all` shows all options." in text
    assert text.index("--name") < text.index("Cluster requirements:")
    assert "--toleration" in everything and "--toleration" not in text


def test_each_main_option_of_submit_exists():
    """Every name in the groups of main options is an option that `submit` shows."""
    from gptddp.k8s.cli.spec_commands import MAIN as OF_A_JOB

    named = [name for names in OF_A_JOB.values() for name in names]
    assert sorted(named) == sorted(
        set(options(shown("gptddp-k8s", "submit", "--help"))) - {"--help"}
    )


def test_the_package_runs_as_a_module():
    """`python -m gptddp` works like `gptddp`, and its usage shows how it was called."""
    run = [sys.executable, "-m", "gptddp"]
    found = subprocess.run([*run, "train", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0 and found.stdout.startswith("usage: python -m gptddp train [")
    found = subprocess.run([*run, "trian"], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 2 and "Usage: python -m gptddp [OPTIONS] COMMAND" in found.stderr
