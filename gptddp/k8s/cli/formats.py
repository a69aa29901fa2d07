"""Objects and rows on stdout, in kubectl's formats."""

import json
from collections.abc import Sequence
from typing import Any

import click

from gptddp.k8s.objects import Object


def objects(found: Sequence[Object], output: str) -> None:
    """Print objects as yaml, json or name; several as YAML documents, or as a List in JSON."""
    from gptddp.k8s.objects import resource
    from gptddp.k8s.render import manifest

    if output == "name":
        for it in found:
            click.echo(resource(it["kind"], it["metadata"]["name"]))
    else:
        text = manifest.to_yaml(found) if output == "yaml" else manifest.to_json(list(found))
        click.echo(text, nl=False)


def data(value: Any, output: str) -> None:
    """Print the result of a command as yaml or json."""
    if output == "json":
        click.echo(json.dumps(value, indent=2))
        return
    import yaml

    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=4096)
    click.echo(text, nl=False)
