"""A job on a few lines that are drawn again and again: what `status --watch` shows."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gptddp.errors import visible
from gptddp.k8s.observe import rank_0_log, status

_WIDE = 72  # columns, from which on there is room for all
_BAR = 30  # characters
_SPARK = 60
_BAD = ("why", "storage", "stalled", "slow")


def frame(
    console: Console,
    shown: Mapping[str, Any],
    losses: Sequence[float],
    *,
    height: int = 0,
    unicode: bool = True,
    note: str = "",
) -> Group:
    """What the console is to show of a `status`; of pods that exceed `height` lines the number.

    unicode: can it show the blocks of a sparkline? note: what keeps this from being new.
    """
    count, done = shown["replicas"], shown["progress"] or {}
    head = f"{shown['name']}  {status.state_line(shown)}  pods {count['ready']}/{count['desired']}"
    lines: list[RenderableType] = [_text(head, "bold red" if shown["world"]["text"] else "bold")]
    lines += [_text(note, "red")] if note else []
    grid = Table.grid(padding=(0, 2, 0, 0))
    rows: dict[str, RenderableType] = {"why": shown["why"]}
    if done:
        rows |= {
            "step": _step(done, console.width),
            "loss": _loss(done, losses, console.width, unicode),
        }
        rows["speed"] = "  ".join(status.pace(done))
    rows |= rank_0_log.rows(dict(shown)) | {"checkpoint": shown["checkpoint"] or ""}
    for name, it in rows.items():
        if it:
            style = "red" if name in _BAD else ""
            grid.add_row(f"{name}:", _text(it, style) if isinstance(it, str) else it)
    if grid.row_count:
        lines.append(grid)
    if shown["pods"]:
        taken = sum(len(console.render_lines(it, pad=False)) for it in lines)
        most = height and max(1, height - taken - 2)
        lines += ["", *_pods(shown["pods"], most, 5 if console.width >= _WIDE else 2)]
    return Group(*lines)


def _text(text: str, style: str = "") -> Text:
    return Text(visible(text), style, overflow="fold")


def _step(done: Mapping[str, Any], width: int) -> RenderableType:
    part = min(1.0, done["step"] / done["steps"]) if done["steps"] else 0.0
    text = f"{done['step']}/{done['steps']}  {100 * part:.0f}%"
    if width < _WIDE:
        return text
    row = Table.grid(padding=(0, 2, 0, 0))
    row.add_row(text, ProgressBar(total=1.0, completed=part, width=_BAR))
    return row


def _loss(done: Mapping[str, Any], losses: Sequence[float], width: int, unicode: bool) -> Text:
    text = "not finite" if done["loss"] is None else f"{done['loss']:.4f}"
    room = max(0, min(_SPARK, width - len(text) - 16))  # beside the names of the rows
    return Text(f"{text}  {rank_0_log.sparkline(losses, room, unicode)}".rstrip(), no_wrap=True)


def _pods(pods: Sequence[Mapping[str, Any]], most: int, columns: int) -> list[RenderableType]:
    """A table of the pods; `most`: of its rows, 0 for all."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="")
    for name in ("POD", "STATUS", "RESTARTS", "AGE", "NODE")[:columns]:
        table.add_column(name, no_wrap=True)
    number = len(pods) if not most or len(pods) <= most else most - 1
    for it in pods[:number]:
        age = status.duration(it["age_s"])
        cells = it["name"], it["status"], str(it["restarts"]), age, it["node"] or "-"
        table.add_row(*map(_text, cells[:columns]))
    more = len(pods) - number
    return [table, f"and {more} more pods"] if more else [table]
