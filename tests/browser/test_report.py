"""Pages of `gptddp report` in a real browser."""

import json
import re
import time

import pytest
from support.report_pages import write
from support.waiting import until

from gptddp.report.page import report
from gptddp.run.history import history

NAMES = ("one", "two", "many-ranks", "short")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("look", "width"), [("light", 1280), ("dark", 1280), ("phone", 390)])
def test_a_page_is_drawn_without_an_error_and_fits(tab, pages, pictures, name, look, width):
    """A page has no console message, no request except for its file, and fits the screen."""
    _, page = pages[name]
    tab.show(page, width, dark=look == "dark")
    tab.picture(pictures / f"{name}-{look}.png")
    assert tab.told == []
    assert [it for it in tab.asked if not it.startswith(("file:", "blob:", "data:"))] == []
    assert tab.run("document.documentElement.scrollWidth") <= width
    plots = "document.querySelectorAll('.plot')"
    assert tab.run(f"[...{plots}].every((it) => it.querySelector('.main-svg') || !it.clientWidth)")
    assert tab.run(f"{plots}.length") >= 5


@pytest.mark.parametrize("dark", [False, True])
def test_text_can_be_read(tab, pages, dark):
    """Every colour of text has a contrast of 4.5 to 1 with what is behind it (WCAG 2.2, 1.4.3)."""
    tab.show(pages["one"][1], dark=dark)
    assert (
        tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    ) != dark
    code = "getComputedStyle(document.documentElement).getPropertyValue('--{}').trim()"
    colours = {it: luminance(tab.run(code.format(it))) for it in
               ("bg", "soft", "fg", "dim", "link", "good", "bad", "warn")}  # fmt: skip
    for text in ("fg", "dim", "link", "good", "bad", "warn"):
        for behind in ("bg", "soft"):
            low, high = sorted((colours[text], colours[behind]))
            assert (high + 0.05) / (low + 0.05) >= 4.5, (text, behind)


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`, as WCAG 2.2 defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [it / 12.92 if it <= 0.04045 else ((it + 0.055) / 1.055) ** 2.4 for it in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_plots_can_be_read_and_zoomed_by_keys(tab, pages):
    """Tab selects the first plot, an arrow a step with its values; + zooms all plots, 0 resets."""
    runs, page = pages["one"]
    tab.show(page)
    for _ in range(40):
        tab.press("Tab")
        if tab.run("document.activeElement.id") == "loss":
            break
    assert tab.run("document.activeElement.id") == "loss"
    for _ in range(3):
        tab.press("ArrowRight")
    said = tab.run("document.querySelector('#fig-loss .readout').textContent").split("\n")
    loss = {line["step"]: line["loss"] for line in history(runs[0])}[3]
    assert said[0] == "step 3" and said[1] == f"training {loss:.6g}"
    assert said[2].startswith("training, mean of 9 ")
    span = "(([a, b]) => b - a)(document.getElementById('lr')._fullLayout.xaxis.range)"
    before = tab.run(span)
    tab.press("+")
    until(lambda: tab.run(span) < 0.6 * before)
    tab.press("0")
    until(lambda: tab.run(span) == before)


def test_the_plot_of_ranks_can_be_read_by_keys(tab, pages):
    """In the plot of ranks, the down arrow is the next rank, and the right arrow is later."""
    tab.show(pages["one"][1])
    tab.run("document.getElementById('ranks-0').focus()")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        tab.press(key)
    said = tab.run("document.querySelector('#ranks-0 + .readout').textContent")
    assert re.fullmatch(r"2023-11-14 22:13:\d\d UTC, rank 1: start", said), said


def point(tab, part, height=0.5):
    """Move the mouse to a part of the width of the first plot."""
    x, y, width, tall = tab.run(
        "(() => { const it = document.querySelector('#loss .nsewdrag'); it.scrollIntoView("
        "{block: 'center'}); const r = it.getBoundingClientRect();"
        " return [r.x, r.y, r.width, r.height] })()"
    )
    for by in (1, 0):
        at = {"x": x + part * width + by, "y": y + height * tall}
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("width", "where"), [(1400, "#loss .hoverlayer"), (390, "#loss ~ .readout")]
)
@pytest.mark.parametrize("part", [0.02, 0.256, 0.98])
def test_pointing_at_a_plot_shows_its_numbers(tab, pages, width, where, part):
    """Mouse or finger at a point shows its values, and the text of a restart, within the window."""
    tab.show(pages["two"][1], width)
    point(tab, part)
    found = f"document.querySelector('{where}')"
    until(lambda: "mean of" in tab.run(f"{found}.textContent"))
    if part == 0.256:  # step 225
        assert "life 2: " in tab.run(f"{found}.textContent")
    box = f"(({{left, right}}) => [left, right])({found}.getBoundingClientRect())"
    left, right = tab.run(box)
    assert 0 <= left < right <= width


@pytest.mark.parametrize(("width", "height"), [(1400, 900), (390, 844)])
def test_the_first_screen_has_the_best_run_and_what_differed(tab, pages, width, height):
    """The best run's row, name, loss and setting are visible without scrolling."""
    tab.show(pages["two"][1], width)
    cells = "document.querySelector('header tr:has(.state)').cells"
    texts = tab.run(f"[...{cells}].slice(0, 3).map((it) => it.innerText)")
    assert texts[0].split()[0].lower() == "best" and texts[2] == "900"
    edges = f"[...{cells}].slice(0, 3).map((it) => it.getBoundingClientRect())"
    right, bottom = tab.run(f"[Math.max(...{edges}.map((it) => it.right)), {edges}[0].bottom]")
    assert right <= width and bottom <= height


CHOICE = """(([name, value]) => {
  const it = document.querySelector(`#view [name=${name}]`);
  if (it.type === "checkbox") it.checked = value; else it.value = value;
  it.dispatchEvent(new Event("change", { bubbles: true }));
})"""
SEEN = "document.getElementById('loss')._fullLayout"


def choose(tab, name, value):
    """Change a field of the form above the plots."""
    tab.run(f"{CHOICE}({json.dumps([name, value])})")


def test_the_form_applies_to_all_plots(tab, pages):
    """A run that is switched off is in no plot; x axis, smoothing and scale apply to all plots."""
    tab.show(pages["two"][1])
    plots = "[...document.querySelectorAll('#curves .plot')]"
    names = f"{plots}.flatMap((it) => it.data.map((t) => t.name))"
    assert {re.split("[:,]", it)[0] for it in tab.run(names)} == {"one", "other"}
    choose(tab, "run", False)
    until(lambda: {re.split("[:,]", it)[0] for it in tab.run(names)} == {"other"})
    choose(tab, "smooth", "0")
    until(lambda: not any("mean of" in it for it in tab.run(names)))
    choose(tab, "log", True)
    until(lambda: tab.run(f"{SEEN}.yaxis.type") == "log")
    for x, title, last in (
        ("tokens", "tokens", 700_000),
        ("time", "h since the run began", (700 * 0.5 + 10 + 4) / 3600),
    ):
        choose(tab, "x", x)
        until(lambda title=title: tab.run(f"{SEEN}.xaxis.title.text") == title)
        end = tab.run("document.getElementById('loss').data[0].x.at(-1)")
        assert end == pytest.approx(last, rel=0.02)
    assert tab.told == []


def test_a_page_that_reloads_itself_keeps_its_view(tab, tmp_path):
    """Choices, zoom, scrolling, open sections and focus are kept, and the numbers are new."""
    run, out = write(tmp_path / "run", 700), tmp_path / "report.html"
    log, lines = run / "log.1.jsonl", (run / "log.1.jsonl").read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:650]))
    report([run], out, 1)
    tab.show(out)
    choose(tab, "x", "tokens")
    choose(tab, "log", True)
    until(lambda: tab.run(f"{SEEN}.xaxis.title.text") == "tokens")
    tab.run("document.querySelector('details').open = true; scrollTo(0, 500); window.old = true;"
            "document.getElementById('lr').focus({preventScroll: true})")  # fmt: skip
    tab.run("zoomTo(figures[0], 300000, 0.5).then(() => 1)")
    zoom = tab.run(f"{SEEN}.xaxis.range")
    log.write_text("".join(lines))
    report([run], out, 1)
    until(lambda: "700" in tab.run("document.querySelector('.tiles')?.textContent || ''")
                  and tab.run("document.documentElement.dataset.drawn && !window.old"))  # fmt: skip
    assert tab.run(f"[{SEEN}.xaxis.range, {SEEN}.yaxis.type]") == [zoom, "log"]
    state = "[document.querySelector('details').open, scrollY, document.activeElement.id]"
    assert tab.run(state) == [True, 500, "lr"]
    report([run], out)
    tab.show(out)  # to stop the reloads
