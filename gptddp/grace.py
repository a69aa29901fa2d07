"""The end of a grace period: who leaves when, so that nobody is killed with work to do."""

# Seconds before the end (of a period of 16 s or more): a worker that hangs leaves by itself; the
# workers that are left are killed by their launcher; the launcher leaves.
WORKER_S, KILL_S, LAUNCHER_S = 8.0, 4.0, 3.0


def limit_s(grace_s: float, margin_s: float) -> float:
    """Seconds from the signal to `margin_s` before the end; below 16 s the margin shrinks too."""
    return grace_s - margin_s * min(1.0, grace_s / 16.0)
