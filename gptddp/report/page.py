"""Write runs to one HTML page that needs no network."""

import base64
import gzip
import hashlib
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gptddp import __version__
from gptddp.errors import ConfigError
from gptddp.files import exists, make_folder, write_atomic
from gptddp.report import curves, strip
from gptddp.report.run_record import RunRecord, read
from gptddp.report.sections import compared, sections
from gptddp.report.side_by_side import names_of, table_of

MARK = b'<meta name="generator" content="gptddp report">'
EVERY_S = 5  # least time between two pages
PATIENCE_S = 120.0  # wait for a run that was running: after a fault it starts again


def watch(paths: Sequence[Path], out: Path) -> None:
    """Write the page again and again until no run is running, or Ctrl-C. An open page reloads.

    Raises the errors of `report`.
    """
    until = 0.0
    try:
        while True:
            began = time.monotonic()
            _, states = report(paths, out, EVERY_S)
            if "running" in states:
                until = began + PATIENCE_S
            if began > until or not {"running", "stopped", "lost"} & set(states):
                break
            time.sleep(max(EVERY_S, 4 * (time.monotonic() - began)))  # at most a fifth of a core
    except KeyboardInterrupt:
        pass
    report(paths, out)


def report(paths: Sequence[Path], out: Path, every_s: int = 0) -> tuple[int, list[str]]:
    """Write the page; return its bytes and the states of its runs. Raises ConfigError, OSError.

    A run that is given twice is drawn once. Only an older page is replaced, no other file.
    every_s: the page reloads itself after this many seconds; 0: it does not.
    """
    plots = _plots()
    if exists(out) and not (exists(out, stat.S_ISREG) and _is_page(out)):
        raise ConfigError(f"--out {out} exists and is not a page of gptddp report: give another")
    make_folder(out.resolve().parent)
    runs = [read(path) for path in {path.resolve(): path for path in paths}.values()]
    drawn = list(map(sections, runs, names_of([run.path for run in runs])))
    html = render(runs, drawn, plots, every_s).encode()
    write_atomic(out, html)
    return len(html), [it["state"] for it in drawn]


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return MARK in file.read(1024)


def _plots() -> str:
    """The JavaScript of the plotting library. Raises ConfigError if it is not installed."""
    try:
        import jinja2  # noqa: F401
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"gptddp report needs the package {error.name}: pip install 'gptddp[report]'"
        ) from error
    return str(get_plotlyjs())


def render(
    runs: Sequence[RunRecord], drawn: Sequence[dict[str, Any]], plots: str, every_s: int
) -> str:
    """The page of these runs and their sections; `plots`: the library's JavaScript."""
    import jinja2

    folder = Path(__file__).parent
    env = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    figures = curves.panels(runs, [it["name"] for it in drawn])
    for number, run in enumerate(runs):
        if picture := strip.draw(run):
            figures.append({**picture, "id": f"ranks-{number}"})
    style = (folder / "page.css").read_text("utf-8")
    scripts = ("view.js", "page.js", "ranks.js", "keys.js")
    code = "\n".join((folder / name).read_text("utf-8") for name in scripts)
    packed = base64.b64encode(gzip.compress(plots.encode(), 6, mtime=0)).decode()
    nonce = hashlib.sha256(packed.encode() + code.encode()).hexdigest()[:32]
    return env.from_string((folder / "page.html").read_text("utf-8")).render(
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        nonce=nonce,
        style=style,
        code=code,
        packed=packed,
        figures=figures,
        long=max(len(run.steps) for run in runs) > curves.MANY,
        runs=drawn,
        compared=compared(table_of([it.path for it in runs], runs)) if len(runs) > 1 else None,
        every_s=every_s,
    )
