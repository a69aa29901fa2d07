"""Waits for an event, with a time limit."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 90  # for a busy machine, where Python compiles every module that it imports


def until(
    true: Callable[[], Any],
    what: str = "it",
    timeout_s: float = PATIENCE_S,
    *,
    poll_s: float = 0.02,
    why: Callable[[], Any] = str,
) -> Any:
    """Wait for the first true value. A file that is missing or incomplete is read again.

    AssertionError with the text of `why`, if it does not come in time.
    """
    end = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError, ValueError, KeyError):
            if value := true():
                return value
        assert time.monotonic() < end, f"{what}: not within {timeout_s:g} s\n{why()}"
        time.sleep(poll_s)
