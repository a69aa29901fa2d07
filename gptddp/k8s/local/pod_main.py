"""Becomes a local pod's main process: `pod_main.py PARENT_PID CPUS PROGRAM [ARGUMENTS]`.

A script of its own, because between fork and exec in a running Python little is safe. It ties the
process to its runner's life and to its CPUs, and then is replaced by the program.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Exit code 126 or 127 if the program cannot be started, as a shell has it.

    A cluster would go on trying (StartError, code 128); here the job is to fail with the reason.
    """
    parent, cpus, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(parent):
        sys.exit(137)  # the runner had ended before the line above
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
