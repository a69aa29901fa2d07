"""Long runs give few points, every extreme, and a page that does not grow with the run."""

import math
import random

from support.report_pages import draw, figures, points, write

from gptddp.report.curves import means, thin
from gptddp.run.history import history


def test_thinning_keeps_every_extreme():
    """The least and the largest value, wherever they are, and both ends are kept, in order."""
    numbers = random.Random(3)
    for place in (0, 1, 4999, 50_000, 99_998, 99_999):
        values = [numbers.gauss(0, 1) for _ in range(100_000)]
        values[place] = 99.0
        values[(place + 777) % 100_000] = -99.0
        picked = thin(values, 100)
        assert len(picked) <= 202 and picked == sorted(set(picked))
        assert {place, (place + 777) % 100_000, 0, 99_999} <= set(picked)


def test_short_series_are_not_thinned():
    """They keep their gaps; long series drop them; a series without finite values is not drawn."""
    assert thin([1.0, math.nan, 3.0], 100) == [0, 1, 2]
    assert min(thin([math.nan] * 500 + [1.0, 2.0] * 500, 100)) == 500
    assert thin([math.nan] * 10) == thin([]) == thin([math.nan] * 5000) == means([]) == []


def test_a_long_run_has_a_small_page_with_its_spike(tmp_path):
    """Five times the steps give nearly the same size, and a spike keeps its true value."""
    sizes = {}
    for steps in (4_000, 20_000):
        run = write(tmp_path / f"{steps}", steps, lives=4)
        log = run / "log.2.jsonl"
        lines = log.read_text().splitlines(keepends=True)
        spike = '"loss": 77.125, "was":'
        lines[steps // 8] = lines[steps // 8].replace('"loss":', spike)
        log.write_text("".join(lines))
        page = draw(run, out=tmp_path / "report.html")
        sizes[steps] = len(page)
        drawn = points(figures(page)["loss"], "training")
        logged = {line["step"]: line["loss"] for line in history(run)}
        assert max(drawn.values()) == 77.125 and len(drawn) <= 2002
        assert min(drawn.values()) == min(logged.values())
        assert all(logged[step] == loss for step, loss in drawn.items())
    assert sizes[20_000] < 1.1 * sizes[4_000] < 3e6
