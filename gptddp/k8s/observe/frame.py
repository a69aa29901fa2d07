"""A job in a few lines that are made anew again and again: what `status --watch` shows."""

from collections.abc import Mapping
from typing import Any

from gptddp import units
from gptddp.errors import visible
from gptddp.k8s.observe import rank_0_log, status, why

BAR = 30  # characters
_BOLD, _RED, _PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[0m"
_BAD = ("why", "storage", "stalled", "slow")


def frame(
    shown: Mapping[str, Any],
    losses: list[float],
    *,
    width: int,
    height: int = 0,
    colours: bool = False,
    unicode: bool = True,
    note: str = "",
) -> list[str]:
    """The lines for a `status`; none wider than `width`, and `height` of them at most (0: all)."""
    count, done = shown["replicas"], shown["progress"] or {}
    head = f"{shown['name']}  {shown['state']}  pods {count['ready']}/{count['desired']}"
    goes_on = shown["state"] in (why.RUNNING, why.RESTARTING)
    loss = units.loss(done["loss"]) if done else ""
    rows = {"why": shown["why"], "step": _step(done, width, goes_on), "loss": loss}
    rows |= {"speed": f"{units.amount(done['tok_s'])} tok/s" if done else ""}
    rows |= rank_0_log.rows(dict(shown)) | {"checkpoint": shown["checkpoint"] or ""}
    key = max(len(name) for name, text in rows.items() if text or name == "step") + 2
    if losses and done:
        room = max(0, min(60, width - key - len(rows["loss"]) - 3))
        rows["loss"] += f"  {rank_0_log.sparkline(losses, room, unicode)}"
    lines = [(head, _BOLD)]
    for name, text in rows.items():
        if text:
            lines.append((f"{name + ':':{key}}{text}", _RED if name in _BAD else ""))
    if shown["pods"]:
        header = ("POD", "STATUS", "RESTARTS", "AGE", "NODE")
        cells = [
            (p["name"], p["status"], str(p["restarts"]), units.duration(p["age_s"]),
             p["node"] or "-") for p in shown["pods"]
        ]  # fmt: skip
        lines += [("", ""), *((line, "") for line in status.table(header, cells))]
    if note:
        lines.insert(1, (note, _RED))
    if height and len(lines) > height:
        hidden = len(lines) - height + 1
        lines = [*lines[: height - 1], (f"and {hidden} more lines", "")]
    return [_styled(visible(text)[:width], style if colours else "") for text, style in lines]


def _styled(text: str, style: str) -> str:
    return f"{style}{text}{_PLAIN}" if style and text else text


def _step(done: Mapping[str, Any], width: int, goes_on: bool) -> str:
    if not done:
        return ""
    part = min(1.0, done["step"] / done["steps"]) if done["steps"] else 0.0
    text = f"{done['step']}/{done['steps']}"
    if width >= 72:
        full = int(BAR * part)
        text += f"  [{'#' * full}{'-' * (BAR - full)}] {units.percent(part)}"
    eta_s = done["left_s"]
    if eta_s is None or not goes_on:
        return text
    return f"{text}  ETA {units.duration(eta_s)}"
