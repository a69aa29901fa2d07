"""`list`: one line per job."""

from typing import TYPE_CHECKING, Any

import click

from gptddp.errors import visible
from gptddp.k8s.cli import formats
from gptddp.k8s.cli.command import note
from gptddp.k8s.cli.options import job_options
from gptddp.units import duration

if TYPE_CHECKING:
    from gptddp.k8s.observe.job_rows import Row


@click.command("list")
@click.option("-A", "--all-namespaces", is_flag=True, help="jobs of all namespaces")
@click.option(
    "-o", "--output", type=click.Choice(["wide", "name", "json", "yaml"]), help="format [a table]"
)
@job_options
def list_(all_namespaces: bool, output: str | None, cluster: Any) -> None:
    """List the jobs of gptddp with their state, pods and age."""
    from gptddp.k8s.observe import job_rows
    from gptddp.k8s.observe.status import table

    rows = job_rows.rows(cluster, all_namespaces)
    if output in ("json", "yaml"):
        formats.data(rows, output)
    elif output == "name":
        for row in rows:
            click.echo(visible(f"pytorchjob.kubeflow.org/{row['name']}"))
    elif rows:
        wide = ["NODES", "QUEUE", "IMAGE"] if output == "wide" else []
        header = [*(["NAMESPACE"] * all_namespaces), "NAME", "STATE", "PODS", "AGE", *wide]
        cells = [_cells(row, all_namespaces, output == "wide") for row in rows]
        click.echo("\n".join(table(header, cells)))
    else:
        prefix = "" if cluster.local else "namespace "
        where = "any namespace" if all_namespaces else f"{prefix}{cluster.namespace}"
        note(f"no jobs of gptddp in {where}")


def _cells(row: "Row", namespace: bool, wide: bool) -> list[str]:
    cells = [row["namespace"]] if namespace else []
    cells += [row["name"], row["state"], f"{row['ready']}/{row['desired']}"]
    cells.append(duration(row["age_s"]))
    if wide:
        nodes = row["nodes"]
        shown = ",".join(nodes[:3]) + (f" and {len(nodes) - 3} more" if nodes[3:] else "")
        cells += [shown or "-", row["queue"] or "-", row["image"] or "-"]
    return [visible(cell) for cell in cells]


COMMANDS = (list_,)
