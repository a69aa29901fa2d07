"""`python -m gptddp`: the `gptddp` command."""

from gptddp.cli import cli

cli()
