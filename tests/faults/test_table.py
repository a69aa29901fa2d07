"""docs/faults.md has every fault, and names tests that there are."""

import math
import re
from pathlib import Path

from faults.table import DOCS, ELSEWHERE, page

TESTS = Path(__file__).parents[1]


def test_every_fault_is_tested():
    """1 to 38: measured here or tested elsewhere, and on the page."""
    here = "".join(path.read_text() for path in TESTS.glob("faults/test_*.py"))
    rows = re.findall(r"pytest\.mark\.fault\((\d+)\)|^    \((\d+), \w", here, re.M)
    measured = {2} | {int(a or b) for a, b in rows}
    assert measured | ELSEWHERE.keys() == set(range(1, 39))
    page = {int(number) for number in re.findall(r"^\| (\d+) \|", DOCS.read_text(), re.M)}
    assert page == set(range(1, 39))


def test_the_tests_named_on_the_page_exist():
    """A test that is renamed is renamed on the page."""
    for _, tests in ELSEWHERE.values():
        for name in tests:
            path, _, function = name.partition("::")
            assert f"def {function}" in (TESTS / path).read_text(), name


def noted(what, seconds, detect_s, reform_s, **more):
    """A measurement as the tests write it."""
    parts = {"detect_s": detect_s, "reform_s": reform_s, "reload_s": 0.25, "first_step_s": 0.5}
    recovered = {"event": "recovered", **parts} if reform_s else {}
    return {"what": what, "seconds": seconds, "redone": 0, "recovered": recovered, **more}


HERE = [
    noted("a kill", 2.0, 0.125, 1.0, fault=3, happens="a new life"),
    noted("a kill", 3.0, 0.25, 2.0, fault=3, happens="a new life"),
    noted("a kill of all", 4.0, None, 3.0, fault=6, happens="from disk"),
    noted("a pause", math.nan, None, None, fault=1, happens="no new life"),
    noted("a cut", 65.0, 60.0, 3.0, fault=15, happens="is no kill"),
]
SHARES = {"training": 90.0, "waiting": 7.0, "redone": 1.0, "books": 1.5, "other": 0.5}
SHARES |= dict.fromkeys(("detection", "reforming", "reload", "start"), 0.0)
OWNED = [{"where": "owners", "test": "test_a.py", "owners": SHARES}]
OWNED += [{"where": "owners", "test": "test_a.py", "owners": {**SHARES, "waiting": 107.0}}]
THERE = [noted("a node", 7.0, 1.0, 5.0, where="cluster")]


def test_where_the_seconds_go():
    """Medians of the parts that are known, blank where none is; of kills with parts alone."""
    sections = page(HERE + THERE, "").split("\n## ")
    rows = [re.findall(r"^\| (?:\d|a ).*", section, re.M) for section in sections[:3]]
    assert rows[0][:2] == [
        "| 1 | a pause | no new life |  | 0 |",
        "| 3 | a kill | a new life | 2.5 | 0 |",
    ]
    assert rows[1] == [
        "| 3 | a kill | 0.19 | 1.50 | 0.25 | 0.50 |",
        "| 6 | a kill of all |  | 3.00 | 0.25 | 0.50 |",
    ]
    assert rows[2] == ["| a node | 7.0 | 1.00 | 5.00 | 0.25 | 0.50 | 0 |"]


def test_whose_the_rank_seconds_were():
    """The parts of all runs of a file; of what is small the largest part of one run."""
    row = "| `test_a.py` | 300 | 60.0 | 38.0 | 0.7 | 0.0 | 0.0 | 0.0 | 0.0 | 1.50 | 0.50 |"
    assert row in page(OWNED, "").splitlines()


def test_what_was_not_measured_stays_as_it_is_on_the_page():
    """The pods of this machine and the cluster are measured one without the other."""
    whole = page(HERE + THERE + OWNED, "")
    assert page([], whole) == whole == page(THERE, page(HERE + OWNED, ""))
    assert "## On a cluster" not in page(HERE, "")
    again = page([noted("another node", 8.0, 1.0, 6.0, where="cluster")], whole)
    assert "| another node | 8.0 |" in again and "| a node |" not in again
    assert again.count("## ") == whole.count("## ") and "| 3 | a kill | a new life |" in again
