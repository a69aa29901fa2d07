"""Becomes a local pod's main process: `pod_main.py PARENT_PID CPUS PROGRAM [ARGUMENTS]`.

A separate script, because little code is safe between fork and exec in a running Python. It ties
the process to its runner and to its CPUs, and then becomes the program by exec.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Start the program; exit code 126 or 127 if that is impossible, as in a shell.

    A cluster would retry for ever (StartError, code 128); here the job fails with the reason.
    """
    parent, cpus, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(137)  # the runner ended before the prctl call
    if cpus:
        os.sched_setaffinity(0, [int(cpu) for cpu in cpus.split(",")])
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and exec keeps that
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]!r}: {error.strerror}", file=sys.stderr)
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)


if __name__ == "__main__":
    main()
