"""Runs -> one HTML page that needs no network."""

import base64
import gzip
import hashlib
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gptddp import __version__
from gptddp.errors import ConfigError
from gptddp.files import exists, write_atomic
from gptddp.report import curves, strip
from gptddp.report.run_record import RunRecord, check, read
from gptddp.report.sections import compared, sections

SCRIPTS = ("page.js", "ranks.js", "keys.js")  # one after the other
MARK = b'<meta name="generator" content="gptddp report">'


def report(
    paths: Sequence[Path], out: Path, tell: Callable[[str], None] = lambda _: None
) -> tuple[int, int]:
    """Write the page; its bytes and its runs. Raises ConfigError, OSError.

    `tell` takes what is read now.
    """
    plots = _plots()
    _may_be_written(out)
    runs = []
    for path in _each_once(paths):
        tell(f"reading {path}")
        runs.append(read(path, tell))
    html = render(runs, plots).encode()
    write_atomic(out, html)
    return len(html), len(runs)


def _each_once(paths: Sequence[Path]) -> list[Path]:
    """The run directories; one that is given twice would be a comparison with itself."""
    return list({path.resolve(): check(path) for path in reversed(paths)}.values())[::-1]


def _plots() -> str:
    """The library that plots, as JavaScript."""
    try:
        import jinja2  # noqa: F401
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"gptddp report needs the package {error.name}: pip install 'gptddp[report]'"
        ) from error
    return str(get_plotlyjs())


def _may_be_written(out: Path) -> None:
    """Nothing but an older page is replaced. Raises ConfigError, OSError."""
    if exists(out, stat.S_ISDIR):
        raise ConfigError(f"--out {out} is a folder: give the name of a file, as {out}/report.html")
    if not exists(out.parent, stat.S_ISDIR):
        raise ConfigError(f"--out {out}: there is no folder {out.parent}: make it first")
    if not exists(out):
        return
    if not exists(out, stat.S_ISREG):
        raise ConfigError(f"--out {out} is no plain file: give the name of one")
    with out.open("rb") as file:
        if MARK not in file.read(1024):
            raise ConfigError(
                f"--out {out} exists and is no page of gptddp report: give another name"
            )


def render(runs: Sequence[RunRecord], plots: str) -> str:
    """The page of these runs; `plots`: the library's JavaScript."""
    import jinja2

    folder = Path(__file__).parent
    env = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    names = _names(runs)
    drawn = _figures(runs)
    style = (folder / "page.css").read_text("utf-8")
    code = "\n".join((folder / name).read_text("utf-8") for name in SCRIPTS)
    packed = base64.b64encode(gzip.compress(plots.encode(), mtime=0)).decode()
    nonce = hashlib.sha256(packed.encode() + code.encode()).hexdigest()[:32]
    return env.from_string((folder / "page.html").read_text("utf-8")).render(
        version=__version__,
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        nonce=nonce,
        style=style,
        code=code,
        packed=packed,
        figures=drawn,
        tables={it["id"]: curves.table_of(it) for it in drawn if "traces" in it},
        runs=[sections(run, name) for run, name in zip(runs, names, strict=True)],
        compared=compared(runs, names) if len(runs) > 1 else None,
    )


def _names(runs: Sequence[RunRecord]) -> list[str]:
    """What each is called: its folder, or all of the path where two folders have one name."""
    names = [run.name for run in runs]
    return [str(run.path) if names.count(run.name) > 1 else run.name for run in runs]


def _figures(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """The plots over the steps, of all runs; then the ranks over time, of each."""
    drawn = curves.panels(runs)
    for number, run in enumerate(runs):
        if picture := strip.draw(run):
            drawn.append({**picture, "id": f"ranks-{number}"})
    return drawn
