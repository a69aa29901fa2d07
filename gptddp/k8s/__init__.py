"""The control plane: from a job specification to Kubernetes objects, or to local processes."""

import sys


def main() -> None:
    """Run the `gptddp-k8s` command, or exit with the package to install if one is missing."""
    try:
        from gptddp.k8s.cli.main import cli
    except ModuleNotFoundError as error:
        sys.exit(f"gptddp-k8s needs the package {error.name}: pip install 'gptddp[k8s]'")
    except KeyboardInterrupt:  # before the command has begun
        sys.exit(130)  # exit_codes.INTERRUPTED, without another import that can be interrupted
    cli()
