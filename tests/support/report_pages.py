"""Reads pages of `gptddp report`, and writes run directories without training."""

import dataclasses
import html
import json
import math
import random
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from gptddp.cli import cli
from gptddp.config import Config
from gptddp.run import summary
from gptddp.run.progress import fold

BEGAN = 1.7e9
STEP_S, GAP_S = 0.5, 4.0


def draw(*runs: Path, out: Path) -> str:
    """The page of these runs, as the command writes it."""
    result = CliRunner().invoke(cli, ["report", *map(str, runs), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{out}\n"
    return out.read_text("utf-8")


def refused(*args: object) -> str:
    """The error of a command that is refused."""
    result = CliRunner().invoke(cli, ["report", *map(str, args)])
    assert result.exit_code == 2, result.output
    return result.stderr


def figures(page: str) -> dict[str, dict[str, Any]]:
    """The plots of a page, by their ids."""
    (text,) = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', page)
    return {it["id"]: it for it in json.loads(text)}


def points(figure: dict[str, Any], name: str = "") -> dict[int, float]:
    """The points by step of the first line with this name."""
    trace = next(it for it in figure["traces"] if name in it["name"] and it["kind"] != "mark")
    return dict(zip(trace["x"]["steps"], trace["y"], strict=True))


def marks(figure: dict[str, Any], kind: str) -> list[str]:
    """The texts of the marks of a kind."""
    return [text for it in figure["traces"] if it.get("mark") == kind for text in it["text"]]


class Text(HTMLParser):
    """The text of a page as a browser shows it, and its scripts and handlers."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text, self.scripts, self.handlers = "", [], []
        self._inside: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "style"):
            self._inside.append(tag)
        if tag == "script":
            self.scripts.append(dict(attrs))
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        self.text += " "

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if not self._inside:
            self.text += data


def table(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table after a heading, row by row."""
    behind = page.split(f"<h2>{heading}</h2>")[1].split("</table>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", behind, re.S)
    cells = (re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S) for row in rows)
    return [[html.unescape(re.sub("<[^>]*>", "", cell)) for cell in row] for row in cells]


def write(
    run: Path,
    steps: int,
    *,
    lives: int = 1,
    ranks: int = 2,
    odd: str = "",
    stop_s: float = 0.0,
    lost: int = 0,
) -> Path:
    """Write a finished run at once. Its lives end by the loss of a rank.

    odd: a text that is put wherever a run may have any. stop_s: the first gap is a stop so long.
    lost: after this step the others continue without the last rank.
    """
    run.mkdir(parents=True)
    numbers, now, chain, step = random.Random(7), BEGAN, 0, 0
    config = {it.name: getattr(Config(), it.name) for it in dataclasses.fields(Config)}
    del config["from_scratch"]
    config |= {"preset": "tiny", "steps": steps, "reduce": "exact", "run_dir": str(run)}
    config["data"] = f"data{odd}"
    known = summary.Summary()
    with open(run / "ledger.jsonl", "w") as ledger:

        def event(name: str, life: int, **fields: Any) -> None:
            said = {"event": name, "time": now, "generation": life, **fields}
            known.add(said)
            if name == "start":
                said["sums"] = known.sums() | {"bytes": ledger.tell()}
                said[summary.HASH] = summary.hash_of(said)
            ledger.write(json.dumps(said) + "\n")

        for life in range(1, lives + 1):
            now += 5.0
            source = f"step-{step:012d}.{life - 1}" if step else "scratch"
            event("start", life, step=step, source=source, redo=0, world_size=ranks, nodes=ranks,
                  restarts=int(step > 0 and not (stop_s and life == 2)), device="cpu", seconds=5.0,
                  machines=[f"a processor{odd}"], run_id="one", version=f"1{odd}",
                  config=config)  # fmt: skip
            phases = {"init": [5.0] * ranks, "step": [0.0] * ranks, "wait": [0.0] * ranks}
            with open(run / f"log.{life}.jsonl", "w") as log:
                for step in range(step + 1, steps * life // lives + 1):  # noqa: B020
                    now += STEP_S
                    for rank in range(ranks):  # the last one is slow
                        phases["step"][rank] += STEP_S * (0.5 + 0.5 * (rank == ranks - 1))
                        phases["wait"][rank] += STEP_S * 0.5 * (rank != ranks - 1)
                    batch = numbers.getrandbits(64)
                    chain = fold(chain, batch)
                    line = {
                        "step": step,
                        "loss": 2 + 5 * math.exp(-5 * step / steps) + numbers.gauss(0, 0.05),
                        "grad_norm": numbers.lognormvariate(0, 0.3),
                        "lr": 0.003 * (1 - step / steps),
                        "tokens": 1000 * step,
                        "tok_s": 2000 * numbers.uniform(0.9, 1.0),
                        "data_wait_s": numbers.expovariate(1e4),
                        "batch_fp": f"{batch:016x}",
                        "chain_fp": f"{chain:016x}",
                        "world_size": ranks,
                        "time": now,
                    }
                    if step % max(1, steps // 20) == 0:
                        line |= {"val_loss": line["loss"] + 0.1, "val_bpb": line["loss"] / 3}
                    if step % 20 == 1:
                        line["phases"] = {name: list(row) for name, row in phases.items()}
                    log.write(json.dumps(line) + "\n")
                    if step == lost:
                        at, now, ranks = now + 0.5, now + GAP_S, ranks - 1
                        gone = {"rank": ranks, "pod": f"job-worker-1{odd}", "how": "it was killed"}
                        about = {"world_size": ranks, "nodes": ranks, "lost": [gone], "joined": []}
                        about |= {"pause_s": GAP_S - 0.5, "at": at, "since_s": 0.5}
                        event("world", life, step=step, **about, phases=phases)
                        phases = {"step": [0.0] * ranks, "wait": [0.0] * ranks}
            if life == lives:
                event("stop", life, step=step, cause="steps", tokens=1000 * step, phases=phases)
            elif stop_s and life == 1:
                event("stop", life, step=step, cause="stopped", phases=phases)
                now += stop_s
            else:
                at, now = now + 0.5, now + GAP_S
                cause = f"rank {ranks - 1} (job-worker-1{odd}) is gone"
                event("end", life, step=step, cause=cause, at=at, phases=phases)
    return run


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]), lives=int(sys.argv[3]), ranks=int(sys.argv[4]))
