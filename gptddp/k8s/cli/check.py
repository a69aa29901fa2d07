"""The commands that judge without a cluster: `validate` and `rules`."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gptddp.errors import visible
from gptddp.k8s.cli import types
from gptddp.k8s.cli.command import note

if TYPE_CHECKING:
    from gptddp.k8s.render.validate import Verdict

INVALID = 2


@click.command()
@click.option(
    "-f",
    "--file",
    "paths",
    type=types.PATH,
    multiple=True,
    required=True,
    metavar="FILE",
    help="YAML, JSON or job.toml, a folder of them, - for stdin; may be repeated",
)
@click.option("-R", "--recursive", is_flag=True, help="with the folders in a folder")
@click.option("-o", "--output", type=click.Choice(["json"]), help="format [text]")
@click.pass_context
def validate(
    ctx: click.Context, paths: tuple[Path, ...], recursive: bool, output: str | None
) -> None:
    """Check PyTorchJobs, yours or others', without a cluster.

    Their fields as the API server does, then what the training operator refuses, or lets hang.
    Objects of other kinds are left out. Exit code 2: a problem was found, or nothing to check.

    \b
    gptddp-k8s validate -f job.yaml
    helm template chart | gptddp-k8s validate -f -
    """
    verdicts = [verdict for path in paths for verdict in _verdicts(path, recursive)]
    if output == "json":
        import json

        click.echo(json.dumps([_to_dict(verdict) for verdict in verdicts], indent=2))
    else:
        for verdict in verdicts:
            _print(verdict)
    if others := sorted({verdict.kind for verdict in verdicts if not verdict.checked}):
        note(f"left out, as only PyTorchJobs are checked: {', '.join(map(visible, others))}")
    checked = [verdict for verdict in verdicts if verdict.checked]
    count = sum(len(verdict.problems) for verdict in checked)
    bad = sum(bool(verdict.problems) for verdict in checked)
    if not checked:
        named = " ".join(f"-f {path}" for path in paths)
        note(
            f"error: {named}: no PyTorchJob in it that stands by itself, so nothing was checked;"
            " name a file that has one"
        )
    elif count:
        of = f"{bad} of {len(checked)} objects" if len(checked) > 1 else "it"
        note(f"{count} problem{'s' if count > 1 else ''} in {of}")
    ctx.exit(INVALID if bad or not checked else 0)


def _verdicts(path: Path, recursive: bool) -> Iterator["Verdict"]:
    """Of every object of a file, or of the files of a folder. Raises ConfigError."""
    from gptddp.k8s.render import documents, validate

    if path.suffix == ".toml":
        yield _of_job_file(path)
        return
    for file in documents.files(path, recursive):
        name = "stdin" if str(file) == documents.STDIN else str(file)
        for document in documents.parse(documents.read_text(file), name):
            yield validate.judge(document)


def _of_job_file(path: Path) -> "Verdict":
    """Of the options in a job.toml, and of the job that is made of them."""
    from gptddp.k8s.render import manifest, rules, spec, validate

    job = spec.load(path, {}, ())
    found = rules.check_spec(job)
    if not found:
        found = validate.check(manifest.objects(job)[-1])
        for warning in rules.warnings(job):
            note(f"warning: {warning}")
    problems = [(1, problem) for problem in found]
    return validate.Verdict(str(path), 1, "job", job.name, problems)


def _print(verdict: "Verdict") -> None:
    what = visible(f"{verdict.kind}/{verdict.name}" if verdict.name else verdict.kind)
    for line, problem in verdict.problems:
        click.echo(visible(f"{verdict.file}:{line}: {problem}"))
    if verdict.checked and not verdict.problems:
        click.echo(f"{visible(verdict.file)}:{verdict.line}: {what} is valid")


def _to_dict(verdict: "Verdict") -> dict[str, Any]:
    return {
        "file": verdict.file,
        "line": verdict.line,
        "kind": verdict.kind,
        "name": verdict.name,
        "valid": not verdict.problems if verdict.checked else None,
        "problems": [
            {"id": it.id, "line": line, "field": it.field, "rule": it.rule, "fix": it.fix}
            for line, it in verdict.problems
        ],
    }


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID ...]")
@click.option("-o", "--output", type=click.Choice(["json"]), help="format [text]")
def rules(ids: tuple[str, ...], output: str | None) -> None:
    """List the rules of jobs: id, field, rule and fix.

    Of these ids, or all. A message ends with the id of the rule that is broken. Those of options
    are checked by `render` and `submit`, those of manifests by `validate` too.

    \b
    gptddp-k8s rules replica-count
    """
    from gptddp.flags import did_you_mean
    from gptddp.k8s.render import catalogue

    found = {rule.id: rule for rule in catalogue.rules()}
    for id in ids:
        if id not in found:
            raise click.UsageError(f"no rule has the id {id!r}{did_you_mean(id, found)}")
    chosen = [found[id] for id in dict.fromkeys(ids or found)]
    if output == "json":
        import dataclasses
        import json

        click.echo(json.dumps([dataclasses.asdict(rule) for rule in chosen], indent=2))
        return
    for rule in chosen:
        click.echo(f"{rule.id}  ({rule.of})\n  field: {rule.field}\n  rule:  {rule.rule}")
        click.echo(f"  fix:   {rule.fix}")


COMMANDS = (validate, rules)
