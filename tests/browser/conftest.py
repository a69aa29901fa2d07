"""A browser, and where its pictures go."""

import os
import shutil
from pathlib import Path

import pytest
from support import browser
from support.report_pages import draw, write


@pytest.fixture(scope="session")
def tab(tmp_path_factory):
    """A tab of a headless Chromium."""
    program = shutil.which("chromium")
    if not program:
        pytest.skip("no chromium: apt-get install chromium")
    with browser.browser(program, tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    """The folder for screenshots, for people to look at."""
    return Path(os.environ.get("PICTURES") or tmp_path_factory.mktemp("pictures"))


@pytest.fixture(scope="session")
def pages(tmp_path_factory):
    """By name: the directories of one or several runs, and their page."""
    folder = tmp_path_factory.mktemp("runs")
    made = {
        "one": [write(folder / "one", 900, lives=4, ranks=4, stop_s=86_400.0)],
        "many-ranks": [write(folder / "many-ranks", 600, lives=12, ranks=48)],
        "short": [write(folder / "short", 1, ranks=1)],
    }
    made["two"] = [*made["one"], write(folder / "other", 700, lives=2)]
    for name, runs in made.items():
        draw(*runs, out=folder / f"{name}.html")
    return {name: (runs, folder / f"{name}.html") for name, runs in made.items()}
