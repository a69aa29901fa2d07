"""The end of a grace period: the order in which processes exit, so that none is killed at work."""

# Seconds before the end (of a period of 16 s or more): a worker that hangs exits by itself; the
# launcher kills the remaining workers; the launcher exits.
WORKER_S, KILL_S, LAUNCHER_S = 8.0, 4.0, 3.0


def limit_s(grace_s: float, margin_s: float) -> float:
    """Seconds from the signal to `margin_s` before the end; below 16 s the margin shrinks too."""
    return grace_s - margin_s * min(1.0, grace_s / 16.0)
