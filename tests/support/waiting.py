"""Waiting for the thing itself, with a limit."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 90  # a machine with other work, where Python compiles every module it imports


def until(
    true: Callable[[], Any],
    what: str = "it",
    timeout_s: float = PATIENCE_S,
    *,
    poll_s: float = 0.02,
    why: Callable[[], Any] = str,
) -> Any:
    """The first true value; what is not there yet, or not whole, is read again.

    AssertionError with what `why` says, where it has not come true in time.
    """
    end = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(OSError, ValueError, KeyError):
            if value := true():
                return value
        assert time.monotonic() < end, f"{what}: not within {timeout_s:g} s\n{why()}"
        time.sleep(poll_s)
