"""`completion`: what a shell needs to complete commands, options and names."""

import click

from gptddp.k8s.cli.command import COMPLETE


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script by which a shell completes commands and names.

    Options too. The names of jobs, namespaces, queues, claims and contexts are those that there
    are now.

    \b
    source <(gptddp-k8s completion bash)
    gptddp-k8s completion fish | source
    """
    from click.shell_completion import get_completion_class

    known = get_completion_class(shell)
    assert known is not None
    click.echo(known(ctx.find_root().command, {}, "gptddp-k8s", COMPLETE).source())


COMMANDS = (completion,)
