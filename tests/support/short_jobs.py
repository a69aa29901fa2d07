"""The Jobs of `prepare` and `sample`, and their pods."""

import yaml
from click.testing import CliRunner

from gptddp.k8s.cli.main import cli


def dry_run(*args):
    """The Job that `prepare` with these options would create."""
    result = CliRunner().invoke(cli, ["prepare", "--dry-run", *args])
    assert result.exit_code == 0, result.output
    return yaml.safe_load(result.stdout)


def pod_of(job):
    """The spec of its pods."""
    return job["spec"]["template"]["spec"]
