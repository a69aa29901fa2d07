"""The `gptddp-k8s` command: data on stdout, notes on stderr, exit code 2 for refused input.

Nothing here imports torch or a Kubernetes client at the top, so that the command starts fast;
functions import them where they use them.
"""

import click

from gptddp import __version__
from gptddp.click_types import HELP
from gptddp.k8s.cli import change, observe, short_jobs, spec_commands
from gptddp.k8s.cli.command import Group


@click.group(cls=Group, context_settings=HELP)
@click.version_option(__version__, message="gptddp-k8s %(version)s")
def cli() -> None:
    """Train a GPT on Kubernetes: render, submit and run elastic PyTorchJobs."""


for module in (change, observe, short_jobs, spec_commands):
    for command in module.COMMANDS:
        cli.add_command(command)
