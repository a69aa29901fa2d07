"""The frame that `status --watch` draws again and again."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gptddp.errors import visible
from gptddp.k8s.observe import rank_0_log, status

_BAR = 30  # characters
_BAD = ("why", "storage", "stalled", "slow")


def frame(console: Console, shown: Mapping[str, Any], height: int = 0, note: str = "") -> Group:
    """Render a `status` in at most `height` lines (0: no limit), leaving out pods that do not fit.

    note: why the status is out of date.
    """
    count, done = shown["replicas"], shown["progress"]
    head = f"{shown['name']}  {status.state_line(shown)}  pods {count['ready']}/{count['desired']}"
    lines: list[RenderableType] = [Text(visible(head), "bold")]
    if note:
        lines.append(Text(visible(note), "red"))
    grid = Table.grid(padding=(0, 2, 0, 0))
    rows = {"why": shown["why"], "step": status.step_line(done)} | rank_0_log.rows(dict(shown))
    for name, text in (rows | {"checkpoint": shown["checkpoint"]}).items():
        if text:
            style = "red" if name in _BAD else ""
            grid.add_row(f"{name}:", Text(visible(text), style, overflow="fold"))
        if text and name == "step":
            grid.add_row("", ProgressBar(done["steps"] or None, done["step"], width=_BAR))
    if grid.row_count:
        lines.append(grid)
    if pods := status.pods_table(shown["pods"]):
        most = height - sum(len(console.render_lines(it)) for it in lines) - 1
        if height and len(pods) > most:
            pods[max(1, most - 1) :] = [f"and {len(pods) - max(1, most - 1)} more pods"]
        lines += ["", *(Text(visible(it), no_wrap=True, overflow="crop") for it in pods)]
    return Group(*lines)
