"""What a person sees of a page of `gptddp report`, in a real browser."""

import re
import time

import pytest
from support.waiting import until

from gptddp.run.history import history

NAMES = ("one", "two", "many-ranks", "short")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("look", "width"), [("light", 1280), ("dark", 1280), ("phone", 390)])
def test_a_page_is_drawn_without_an_error_and_fits(tab, pages, pictures, name, look, width):
    """No word in the console, no request but for the file, nothing wider than the screen."""
    _, page = pages[name]
    tab.show(page, width, dark=look == "dark")
    tab.picture(pictures / f"{name}-{look}.png")
    assert tab.told == []
    assert [it for it in tab.asked if not it.startswith(("file:", "blob:", "data:"))] == []
    assert tab.run("document.documentElement.scrollWidth") <= width
    plots = "document.querySelectorAll('.plot')"
    assert tab.run(f"[...{plots}].every((it) => it.querySelector('.main-svg'))")
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


def test_plots_are_read_and_zoomed_by_keys(tab, pages):
    """Tab leads to the first plot, an arrow to a step with its number; + zooms all, 0 goes back."""
    runs, page = pages["one"]
    tab.show(page)
    for _ in range(40):
        tab.press("Tab")
        if tab.run("document.activeElement.id") == "loss":
            break
    assert tab.run("document.activeElement.id") == "loss"
    for _ in range(3):
        tab.press("ArrowRight")
    said = tab.run("document.querySelector('#fig-loss .readout').textContent")
    loss = {line["step"]: line["loss"] for line in history(runs[0])}[3]
    assert said.startswith(f"step 3: training {loss}")
    span = "(([a, b]) => b - a)(document.getElementById('lr')._fullLayout.xaxis.range)"
    before = tab.run(span)
    tab.press("+")
    until(lambda: tab.run(span) < 0.6 * before)
    tab.press("0")
    until(lambda: tab.run(span) == before)


def test_the_ranks_over_time_are_read_by_keys(tab, pages):
    """An arrow down is the next rank, an arrow to the right is later."""
    tab.show(pages["one"][1])
    tab.run("document.getElementById('ranks-0').focus()")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
        tab.press(key)
    said = tab.run("document.querySelector('#ranks-0 + .readout').textContent")
    assert re.fullmatch(r"2023-11-14 22:13:\d\d UTC, rank 1: start", said), said


def test_a_finger_or_a_mouse_sees_the_numbers(tab, pages):
    """Pointing at a plot shows the values of that step."""
    tab.show(pages["one"][1])
    where = tab.run(
        "(() => { const it = document.querySelector('#loss .nsewdrag'); it.scrollIntoView();"
        " const r = it.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2] })()"
    )
    for by in (0, 3):
        at = {"x": where[0] + by, "y": where[1]}
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        time.sleep(0.1)
    until(lambda: "mean of" in tab.run("document.querySelector('#loss .hoverlayer').textContent"))
