"""The control plane: from a job specification to Kubernetes objects, or to local processes."""

import sys


def main() -> None:
    """Run the `gptddp-k8s` command, or say what to install when its packages are absent."""
    try:
        from gptddp.k8s.cli.main import cli
    except ModuleNotFoundError as error:
        sys.exit(f"gptddp-k8s needs the package {error.name}: pip install 'gptddp[k8s]'")
    except KeyboardInterrupt:  # before the command could have begun
        sys.exit(130)  # exit_codes.INTERRUPTED, without one more import that can be interrupted
    cli()
