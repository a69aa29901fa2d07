"""`list`: a line a job, once or whenever one changes."""

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from gptddp.errors import visible
from gptddp.k8s.cli import output as formats
from gptddp.k8s.cli.command import note
from gptddp.k8s.cli.options import job_options

if TYPE_CHECKING:
    from gptddp.k8s.observe.listing import Row


@click.command("list")
@click.option("-A", "--all-namespaces", is_flag=True, help="jobs of all namespaces")
@click.option("-w", "--watch", is_flag=True, help="go on, with a line whenever a job changes")
@click.option(
    "-o", "--output", type=click.Choice(["wide", "name", "json", "yaml"]), help="format [a table]"
)
@job_options
def list_(all_namespaces: bool, watch: bool, output: str | None, cluster: Any) -> None:
    """List the jobs of gptddp with their state, their pods and their age.

    With -w until Ctrl-C; -o json is then an object a line.
    """
    from gptddp.k8s.observe import listing

    printer = _Printer(output, all_namespaces)
    if watch:
        for number, changed in enumerate(listing.watch(cluster, note, all_namespaces)):
            if not number and not changed:
                note(f"{_none(cluster, all_namespaces)} yet")
            printer.add(changed)
        return
    rows = listing.rows(cluster, all_namespaces)
    if output in ("json", "yaml"):
        formats.data(rows, output)
    elif rows:
        printer.add(rows)
    elif output != "name":
        note(_none(cluster, all_namespaces))


def _none(cluster: Any, all_namespaces: bool) -> str:
    of = "" if cluster.local else "namespace "
    where = "any namespace" if all_namespaces else f"{of}{cluster.namespace}"
    return f"no jobs of gptddp in {where}"


class _Printer:
    """Rows as they come; the columns of a table are kept, or grow."""

    def __init__(self, output: str | None, all_namespaces: bool) -> None:
        self._output, self._namespaces = output, all_namespaces
        self._widths: list[int] = []

    def add(self, rows: "Sequence[Row]") -> None:
        for row in rows:
            if self._output == "json":
                click.echo(json.dumps(row))
            elif self._output == "yaml":
                click.echo("---")
                formats.data(row, "yaml")
            elif self._output == "name":
                click.echo(visible(f"pytorchjob.kubeflow.org/{row['name']}"))
        if rows and self._output in (None, "wide"):
            self._print([self._cells(row) for row in rows])

    def _print(self, cells: list[list[str]]) -> None:
        if not self._widths:
            cells.insert(0, self._header())
        columns = list(zip(*cells, strict=True))
        old = self._widths or [0] * len(columns)
        self._widths = [max(w, *map(len, column)) for w, column in zip(old, columns, strict=True)]
        for line in cells:
            click.echo(_aligned(line, self._widths))

    def _header(self) -> list[str]:
        wide = ["NODES", "QUEUE", "IMAGE"] if self._output == "wide" else []
        return [*(["NAMESPACE"] * self._namespaces), "NAME", "STATE", "PODS", "AGE", *wide]

    def _cells(self, row: "Row") -> list[str]:
        from gptddp.k8s.observe.status import duration

        cells = [row["namespace"]] if self._namespaces else []
        cells += [row["name"], row["state"], f"{row['ready']}/{row['desired']}"]
        cells.append(duration(row["age_s"]))
        if self._output == "wide":
            nodes = row["nodes"]
            shown = ",".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if nodes[3:] else "")
            cells += [shown or "-", row["queue"] or "-", row["image"] or "-"]
        return [visible(cell) for cell in cells]


def _aligned(cells: Iterable[str], widths: Sequence[int]) -> str:
    return "   ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


COMMANDS = (list_,)
