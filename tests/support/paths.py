"""Where the tests find what is not a module: the checkout, and scripts to be started."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "support"
