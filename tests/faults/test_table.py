"""docs/faults.md has every fault, and names tests that there are."""

import re
from pathlib import Path

from faults.table import DOCS, ELSEWHERE

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
