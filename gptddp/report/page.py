"""Runs -> one HTML page that needs no network."""

import base64
import gzip
import hashlib
import stat
import time
from collections.abc import Sequence
from pathlib import Path

from gptddp import __version__
from gptddp.errors import ConfigError
from gptddp.files import exists, make_folder, write_atomic
from gptddp.report import curves, strip
from gptddp.report.run_record import RunRecord, read
from gptddp.report.sections import compared, sections

MARK = b'<meta name="generator" content="gptddp report">'


def report(paths: Sequence[Path], out: Path) -> tuple[int, int]:
    """Write the page; its bytes and its runs. Raises ConfigError, OSError.

    A run that is given twice is drawn once, and no file is replaced but an older page.
    """
    plots = _plots()
    if exists(out) and not (exists(out, stat.S_ISREG) and _is_page(out)):
        raise ConfigError(f"--out {out} is there, and is no page of gptddp report: give another")
    make_folder(out.resolve().parent)
    runs = [read(path) for path in {path.resolve(): path for path in paths}.values()]
    html = render(runs, plots).encode()
    write_atomic(out, html)
    return len(html), len(runs)


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return MARK in file.read(1024)


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


def render(runs: Sequence[RunRecord], plots: str) -> str:
    """The page of these runs; `plots`: the library's JavaScript."""
    import jinja2

    folder = Path(__file__).parent
    env = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    names = [run.name for run in runs]  # or all of the path where two folders have one name
    names = [str(it.path) if names.count(it.name) > 1 else it.name for it in runs]
    drawn = curves.panels(runs)
    for number, run in enumerate(runs):
        if picture := strip.draw(run):
            drawn.append({**picture, "id": f"ranks-{number}"})
    style = (folder / "page.css").read_text("utf-8")
    scripts = ("page.js", "ranks.js", "keys.js")
    code = "\n".join((folder / name).read_text("utf-8") for name in scripts)
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
        runs=[sections(run, name) for run, name in zip(runs, names, strict=True)],
        compared=compared(runs, names) if len(runs) > 1 else None,
    )
