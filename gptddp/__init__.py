"""Pre-train GPT language models with PyTorch DDP, on pods that may be killed at any moment."""

import sys

__version__ = "0.1.0"


def main() -> None:
    """Run the `gptddp` command, or say what to install when its packages are absent."""
    try:
        from gptddp.cli import cli
    except ModuleNotFoundError as error:
        sys.exit(f"gptddp needs the package {error.name}: pip install 'gptddp[train]'")
    cli()
