"""The jobs in k8s/jobs are what `render` prints for the commands in their README."""

import re
import shlex

import pytest
from click.testing import CliRunner
from support.paths import ROOT

from gptddp.k8s.cli.main import cli

JOBS = ROOT / "k8s/jobs"
COMMANDS = dict(re.findall(r"\((\S+\.yaml)\).*`gptddp-k8s (.*)`", (JOBS / "README.md").read_text()))


def render(command):
    result = CliRunner().invoke(cli, shlex.split(command))
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_an_example_is_what_its_command_prints(name):
    """Byte for byte.

    After a change that is meant: `PYTHONPATH=tests python tests/k8s/test_examples.py`.
    """
    assert (JOBS / name).read_text() == render(COMMANDS[name])


def test_every_example_has_its_command():
    """No file without a line in the README."""
    assert {path.name for path in JOBS.glob("*.yaml")} == set(COMMANDS)


if __name__ == "__main__":
    for name, command in COMMANDS.items():
        (JOBS / name).write_text(render(command))
