"""What a mistyped value, an unset variable or a full disk behind stdout is answered with."""

import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from support.paths import ROOT

from gptddp.k8s.cli import types
from gptddp.k8s.cli.main import cli

COMMANDS = list(cli.commands.values())
SPECS = ("render", "submit", "doctor")  # the commands with the options of a job
AT = ("--kubeconfig", "/dev/null")  # no cluster: what is refused before it is asked, is refused


@pytest.fixture
def k8s():
    """Run `gptddp-k8s` with arguments."""
    return lambda *args: CliRunner().invoke(cli, args, prog_name="gptddp-k8s")


def refused(result, *words):
    """Exit code 2, nothing on stdout, one message with these words that is the first line."""
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert result.stderr.startswith("error: ") and "Error" not in result.stderr
    assert all(word in result.stderr for word in words), result.stderr


def test_every_name_time_and_file_is_checked_before_it_is_used():
    """No command takes a name, a namespace, a time or a file as any text."""
    kinds = {"timeout": types.SECONDS, "kubeconfig": types.FILE, "context": types.WORD}
    kinds |= {"local_dir": types.FOLDER}
    for command in COMMANDS:
        for param in command.params:
            if isinstance(param, click.Argument) and param.name == "name":
                assert param.type is types.JOB, command.name
            if param.name == "namespace" and command.name not in SPECS:  # a rule
                assert param.type is types.NAMESPACE, command.name
            if param.name in kinds:
                assert param.type is kinds[param.name], (command.name, param.name)


@pytest.mark.parametrize("command", ["status", "delete", "logs", "wait", "suspend", "sample"])
@pytest.mark.parametrize("name", ["", "demo?x=1", "demo/../demo", "..", "Demo", "x" * 254, "a b"])
def test_a_name_that_nothing_can_have_is_refused(k8s, command, name):
    """No request is made of it: it is part of an address, or of a folder's path."""
    refused(k8s(command, *AT, name), "cannot name a job", "lower case letters")
    if command in ("status", "wait"):
        refused(k8s(command, "--local", name), "cannot name a job")


def test_a_name_is_taken_as_o_name_prints_it(k8s):
    """`-o name` is for other commands: they take it, of kubectl too; no other kind."""
    for kind in ("pytorchjob.kubeflow.org", "pytorchjobs.kubeflow.org", "pytorchjob"):
        assert types.JOB.convert(f"{kind}/demo", None, None) == "demo"
    for name in ("pod/demo", "pytorchjob/", "pytorchjob/a/b", "pytorchjob/../b"):
        refused(k8s("delete", *AT, name), "cannot name a job")


def test_a_name_that_no_job_can_have_is_said_once(k8s):
    """By its option, and not by the names and labels that would have it too."""
    result = k8s("render", "--name", "demo?x=1")
    refused(result, "--name: 'demo?x=1' is not the name of a job")
    assert len(result.stderr.splitlines()) == 1


def test_a_command_that_is_none_is_told_which_it_may_be(k8s):
    """The one that it is near to."""
    refused(k8s("rendr"), "No such command 'rendr'. Did you mean 'render'?")


@pytest.mark.parametrize("command", ["status", "delete", "list", "submit", "prepare"])
def test_a_namespace_that_nothing_can_be_is_refused(k8s, command):
    """In every command, those with a specification by its rule."""
    given = {"list": [], "submit": [], "prepare": ["--source", "x"]}.get(command, ["demo"])
    for namespace in ("../..", "", "Demo", "a.b"):
        refused(k8s(command, *given, *AT, "-n", namespace), repr(namespace), "lower case letters")


@pytest.mark.parametrize("seconds", ["-1", "soon", ""])
def test_a_time_that_cannot_be_waited_for_is_refused(k8s, seconds):
    """Negative, or no number."""
    refused(k8s("wait", "demo", *AT, "--timeout", seconds), "'--timeout'", repr(seconds)[1:-1])


@pytest.mark.parametrize("args", [["submit"], ["prepare", "--source", "texts"]])
def test_the_limit_of_a_wait_needs_a_wait(k8s, args):
    """--timeout alone would be ignored."""
    refused(k8s(*args, *AT, "--timeout", "3"), "add --wait or --follow")


@pytest.mark.parametrize("option", ["--kubeconfig", "--context", "--local-dir", "--file"])
def test_an_empty_value_is_no_default(k8s, option):
    """`--kubeconfig "$UNSET"` must not mean another cluster."""
    refused(k8s("submit", option, ""), f"'{option}'", "it is empty")


@pytest.mark.parametrize("option", [["--local-dir", "jobs"], ["--volume", "a=/b"], ["-v"]])
def test_an_option_of_local_jobs_creates_no_job_on_the_cluster(k8s, option):
    """Without --local it is refused, also with the value that is the default."""
    refused(k8s("submit", *AT, *option), "has no meaning here: it is for --local")
    refused(k8s("submit", *AT, "--local-dir", "gptddp-local"), "--local-dir has no meaning here")


@pytest.mark.parametrize("command", ["render", "submit", "prepare"])
def test_an_argument_too_much_is_named_so(k8s, command):
    """It is no misspelt option of the trainer."""
    refused(
        k8s(command, "extra", *{"prepare": ["--source", "x"]}.get(command, [])),
        "unexpected argument 'extra'",
    )


def test_after_the_dashes_there_are_options_only(k8s):
    """A word there is named as what it is."""
    refused(k8s("render", "--", "extra"), "unexpected argument 'extra'")
    refused(k8s("render", "--", "--steps", "9", "10"), "unexpected argument '10'")


@pytest.mark.parametrize("option", ["--env=A=", "--data=", "--node-selector=a=", "--name="])
def test_bytes_that_are_no_text_are_refused(k8s, option):
    """What the shell passes on of another encoding would break the manifest's hash."""
    refused(k8s("render", option + "\udcff"), "is not UTF-8")
    refused(k8s("render", "--", "--init-from", "/data/\udcff"), "is not UTF-8")


def test_a_mistake_has_the_words_of_one_program(k8s):
    """click's messages are opened as ours are, and name the help."""
    for args in (["nope"], ["status"], ["render", "--nope"], ["render", "-o", "xml"]):
        refused(k8s(*args), "--help` shows what it takes")


# -- where the output goes -----------------------------------------------------------------------


def shell(script, *args, unbuffered=""):
    """Run a shell script in which "$@" is the command and its arguments."""
    code = "from gptddp.k8s import main; main()"
    command = ["sh", "-c", script, "sh", sys.executable, "-c", code, *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("args", [["render"], ["--help"], ["render", "--help"]])
def test_a_full_disk_behind_stdout_is_an_error(args, unbuffered):
    """One line and exit code 1: the output is not there."""
    result = shell('"$@" >/dev/full', *args, unbuffered=unbuffered)
    line = result.stderr.splitlines()[-1]
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert line == "error: cannot write the output: No space left on device"


def test_a_full_disk_behind_stderr_loses_nothing_else():
    """What is said to the person is left out, and the work is done."""
    result = shell('"$@" 2>/dev/full', "render")
    assert result.returncode == 0 and result.stdout.endswith("sizeLimit: 256Mi\n")
    assert shell('"$@" 2>/dev/full', "render", "--replicas", "0").returncode == 2


@pytest.mark.parametrize("args", ["render -f -", "prepare -f -"])
def test_a_closed_stdin_is_an_error_where_it_is_read(args):
    """Not the default job, and no traceback; elsewhere nobody notices."""
    args = args.split() + ["--source=a/b"] * args.startswith("prepare")
    result = shell('"$@" <&-', *args)
    assert result.returncode == 2 and result.stdout == ""
    assert "Bad file descriptor" in result.stderr and "Traceback" not in result.stderr


def test_a_closed_stdout_is_an_error_and_a_closed_stderr_is_none():
    """What was asked for is not there; what would be said beside it is left out."""
    result = shell('"$@" >&-', "render")
    assert result.returncode == 1 and "cannot write the output: Bad file" in result.stderr
    result = shell('"$@" 2>&- <&-', "render")
    assert result.returncode == 0 and result.stdout.endswith("sizeLimit: 256Mi\n")


def test_a_reader_that_leaves_ends_the_command_quietly():
    """As SIGPIPE ends a program of C."""
    result = shell('{ "$@"; echo $? >&2; } | true', "render", "-o", "json")
    assert result.stderr.splitlines()[-1] in ("141", "0")  # 0: it was faster than `true`
    assert "Traceback" not in result.stderr and "error" not in result.stderr
