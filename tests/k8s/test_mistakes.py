"""Mistyped values, empty options, and a stdout or stderr that is full or closed."""

import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from support.paths import ROOT

from gptddp.k8s.cli import types
from gptddp.k8s.cli.main import cli

AT = ("--kubeconfig", "/dev/null")  # no cluster: refusals must come before any request


@pytest.fixture
def k8s():
    """Run `gptddp-k8s` with arguments."""
    return lambda *args: CliRunner().invoke(cli, args, prog_name="gptddp-k8s")


def refused(result, *words):
    """Exit code 2, nothing on stdout, and a message whose first line has these words."""
    assert result.exit_code == 2 and result.stdout == "", result.output
    assert result.stderr.startswith("error: ") and "Error" not in result.stderr
    assert all(word in result.stderr for word in words), result.stderr


def test_every_name_time_and_file_is_checked_before_it_is_used():
    """No command takes a name, a namespace, a time or a file as plain text."""
    kinds = {"timeout": types.SECONDS, "kubeconfig": types.FILE, "context": types.WORD}
    kinds |= {"local_dir": types.FOLDER, "namespace": types.NAMESPACE}
    for command in cli.commands.values():
        for param in command.params:
            if isinstance(param, click.Argument) and param.name == "name":
                assert param.type is types.JOB, command.name
            rule = param.name == "namespace" and param.type is click.STRING  # a rule checks it
            if param.name in kinds and not rule:
                assert param.type is kinds[param.name], (command.name, param.name)


def test_the_output_of_o_name_is_accepted_as_a_name(k8s):
    """Other commands accept `-o name` of ours and of kubectl, but no other kind."""
    for kind in ("pytorchjob.kubeflow.org", "pytorchjobs.kubeflow.org", "pytorchjob"):
        assert types.JOB.convert(f"{kind}/demo") == "demo"
    for name in ("pod/demo", "pytorchjob/", "pytorchjob/a/b", "pytorchjob/../b"):
        refused(k8s("delete", *AT, name), "cannot name a job")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        *(
            (f"status {place} {it}", ["cannot name a job", "lower case letters"])
            for it in ("demo?x=1", "demo/../demo", "..", "Demo", "x" * 254)
            for place in ("--kubeconfig /dev/null", "--local")
        ),
        ("render --name demo?x=1", ["--name: 'demo?x=1' is not the name of a job"]),
        ("status demo -n ../..", ["'../..' cannot name a namespace", "lower case letters"]),
        ("prepare --source x -n Demo", ["'Demo' cannot name a namespace"]),
        ("wait demo --timeout -1", ["'--timeout'", "-1"]),
        ("submit --timeout 3", ["add --wait or --follow"]),
        ("prepare --source texts --timeout 3", ["add --wait or --follow"]),
        ("submit --kubeconfig=", ["'--kubeconfig'", "it is empty"]),
        ("submit --context=", ["'--context'", "it is empty"]),
        ("submit --local-dir=", ["'--local-dir'", "it is empty"]),
        ("submit --local-dir gptddp-local", ["--local-dir has no meaning here"]),
        *(
            (f"submit {it}", ["has no meaning here"])
            for it in (
                "-v",
                "--volume data=/x",
                "--local --wait",
                "--local --context x",
                "--local --dry-run",
                "--local --replace",
                "--local -o yaml",
                "--dry-run --wait",
                "--dry-run --follow",
                "--dry-run -o yaml",
            )
        ),
        ("submit --follow -o json", ["-o has no meaning with --follow"]),
        ("render extra", ["unexpected argument 'extra'"]),
        ("prepare extra --source x", ["unexpected argument 'extra'"]),
        ("render -- --steps 9 10", ["unexpected argument '10'"]),
        ("render --env=A=\udcff", ["is not UTF-8"]),
        ("status job --local -n x", ["--namespace has no meaning here"]),
        ("status job --local-dir x", ["--local-dir has no meaning here"]),
        ("logs job --local --since 5m", ["--since has no meaning with --local"]),
        ("logs job --local --first-failure", ["--first-failure has no meaning with --local"]),
        ("delete job --local --no-wait", ["--no-wait has no meaning with --local"]),
        *(
            (f"{it}", ["it must be a time, as in 90 (seconds), 45s, 10m (minutes) or 1h30m"])
            for wrong in ("", "-5m", "1d", "5m2h", "5M", "m", "nan", "1e400")
            for it in (f"logs demo --since={wrong}", f"wait demo --timeout={wrong}")
        ),
        ("logs demo --since 0s", ["0.0 is not in the range x>=1"]),
        ("sample demo --tokens 5m", ["as in 400, 10k, 1.5M (millions), 2B or 1e3"]),
        ("render -- --stpes 4", ["unknown option '--stpes': did you mean '--steps'?"]),
        ("render --stpes 4", ["--steps is an option of the trainer: put it after --"]),
        ("render --steps 4", ["an option of the trainer: put it after --"]),
        ("render -- --batch 50 --lanes 48", ["batch 50 is not divisible by lanes 48"]),
        ("render --env A", ["NAME=VALUE"]),
        ("render --env A=1 --env A=2", ["A is given as '1' and as '2'"]),  # twice 1: allowed
        ("render -- --init-from /data/\udcff", ["is not UTF-8"]),
    ],
)
def test_a_mistake_is_refused_with_its_rule(k8s, args, words):
    """No cluster is contacted; click's messages begin like ours."""
    refused(k8s(*args.split()), *words)


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
    """One line and exit code 1, as the output is lost."""
    result = shell('"$@" >/dev/full', *args, unbuffered=unbuffered)
    line = result.stderr.splitlines()[-1]
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert line == "error: cannot write the output: No space left on device"


def test_a_closed_or_full_stderr_loses_only_notes():
    """The command does its work, and returns its exit code."""
    for script in ('"$@" 2>/dev/full', '"$@" 2>&- <&-'):
        result = shell(script, "render")
        assert result.returncode == 0 and result.stdout.endswith("sizeLimit: 256Mi\n")
    assert shell('"$@" 2>/dev/full', "render", "--replicas", "0").returncode == 2


def test_a_closed_stdin_or_stdout_is_an_error_where_it_is_used():
    """A closed stdin is not read as a default job, and there is no traceback."""
    result = shell('"$@" <&-', "render", "-f", "-")
    assert result.returncode == 2 and result.stdout == ""
    assert "Bad file descriptor" in result.stderr and "Traceback" not in result.stderr
    result = shell('"$@" >&-', "render")
    assert result.returncode == 1 and "cannot write the output: Bad file" in result.stderr


def test_a_closed_pipe_ends_the_command_quietly():
    """The exit code is that of a C program that SIGPIPE ends, and there is no message."""
    result = shell('{ "$@"; echo $? >&2; } | true', "render", "-o", "json")
    assert result.stderr.splitlines()[-1] in ("141", "0")  # 0: it was faster than `true`
    assert "Traceback" not in result.stderr and "error" not in result.stderr
