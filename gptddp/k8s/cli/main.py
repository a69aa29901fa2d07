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


cli.known = {
    "completion": ("completion", "Print the script by which a shell completes commands and names."),
    "delete": ("change", "Delete a job with its pods and everything that was created beside it."),
    "diff": ("plan", "Show what differs between a job on the cluster and these options."),
    "doctor": ("plan", "Look for what a cluster lacks for a job, each with its fix."),
    "list": ("listing", "List the jobs of gptddp with their state, their pods and their age."),
    "logs": ("observe", "Print what the pods of a job have written."),
    "prepare": ("short_jobs", "Make a dataset in a volume of the cluster, from texts in a volume."),
    "render": ("submit", "Print the manifest of a job."),
    "resume": ("change", "Let a suspended job go on from its newest checkpoint."),
    "rerun": ("again", "Run a job again with the settings that it has on the cluster."),
    "rules": ("check", "List the rules of jobs: id, field, rule and fix."),
    "sample": ("short_jobs", "Print text from the newest checkpoint of a job."),
    "scale": ("change", "Change the number of pods of a job while it trains."),
    "status": ("observe", "Say how a job does: its state, why it does not run, its step."),
    "submit": ("submit", "Start a job on a cluster, or on this machine."),
    "suspend": ("change", "Stop the pods of a job, which commit a checkpoint, and keep the job."),
    "validate": ("check", "Check PyTorchJobs, yours or others', without a cluster."),
    "wait": ("observe", "Wait for a job's end, and tell each change of its state."),
}  # fmt: skip
