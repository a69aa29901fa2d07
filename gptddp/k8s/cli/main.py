"""The `gptddp-k8s` command: data on stdout, notes on stderr, exit code 2 for what is refused.

Nothing here imports torch or a Kubernetes client, and what `--help` does not need is imported
where it is used, so that the command starts fast.
"""

import click

from gptddp import __version__
from gptddp.k8s.cli.command import Group


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="gptddp-k8s %(version)s")
def cli() -> None:
    """Train a GPT on Kubernetes: render, submit and run elastic PyTorchJobs."""


cli.modules = {
    **dict.fromkeys(("render", "submit"), "submit"),
    "validate": "check",
    **dict.fromkeys(("delete", "scale", "suspend", "resume"), "change"),
    **dict.fromkeys(("list", "status", "top", "logs", "wait"), "observe"),
    **dict.fromkeys(("prepare", "sample"), "short_jobs"),
}
