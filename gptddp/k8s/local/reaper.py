"""Finds and kills the processes of local pods, so that none outlives its runner.

A container's processes die with it because they share a namespace, which requires root. Here every
process of a local pod has a tag in its environment, which its children inherit, and the pod's main
process leads a session. Run as a script, this is the reaper of a job: it reads the sessions from
stdin, a pipe held only by the runner, and when the pipe closes it kills the remaining processes. It
also inherits the job's locks, so that they are free only when the last process is gone.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection

TAG = "GPTDDP_LOCAL_POD"


def members(prefix: str, known: Collection[int] = ()) -> list[int]:
    """Live processes whose tag starts with `prefix`, and all in their or the known sessions.

    The sessions catch processes that were started with another environment.
    """
    needle = f"{TAG}={prefix}".encode()
    sessions: dict[int, int] = {}
    tagged: set[int] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            if fields[0] in (b"Z", b"X"):
                continue
            sessions[int(entry)] = int(fields[3])
            with open(f"/proc/{entry}/environ", "rb") as file:
                if any(item.startswith(needle) for item in file.read().split(b"\0")):
                    tagged.add(int(entry))
        except (OSError, IndexError):
            continue  # the process has ended, or is another user's
    ours = ({sessions[pid] for pid in tagged} | set(known)) - {os.getsid(0)}
    return [pid for pid, session in sessions.items() if pid in tagged or session in ours]


def sweep(prefix: str, known: Collection[int] = (), timeout_s: float = 10.0) -> list[int]:
    """SIGKILL until two scans in a row find no process; returns the processes left at the limit.

    Two, because a process that is just starting has an empty environment for a moment.
    """
    began, clean, alive = time.monotonic(), 0, []
    while clean < 2 and time.monotonic() < began + timeout_s:
        alive = members(prefix, known)
        for pid in alive:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        clean = 0 if alive else clean + 1
        time.sleep(0.01)
    return alive


def main() -> None:
    """`reaper.py PREFIX [FOLDER]`: at the end of stdin, kill the pods and remove the folder.

    Each line of stdin has the sessions of all running pods; the last line counts.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # for the runner; this process ends after it
    last = ["", *sys.stdin][-1]
    sweep(sys.argv[1], [int(session) for session in last.split()])
    for folder in sys.argv[2:]:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
