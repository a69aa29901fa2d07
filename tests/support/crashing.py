"""`crashing.py N MODULE CODE` runs CODE in MODULE, and is killed at its N-th system call."""

import importlib
import os
import signal
import subprocess
import sys

CALLS = ["mkdir", "open", "write", "fsync", "close", "rename", "replace", "link", "unlink", "rmdir"]


def crash_at(number):
    """Kill this process at its n-th system call from now on; half of a write is done."""

    def patch(call):
        original = getattr(os, call)

        def counted(*args, **kwargs):
            nonlocal number
            number -= 1
            if number == 0:
                if call == "write":
                    original(args[0], args[1][: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(os, call, counted)

    for call in CALLS:
        patch(call)


def killed(number, module, code):
    """Run the code in a process. True: it was killed; False: it made fewer than n system calls."""
    command = [sys.executable, __file__, str(number), module, code]
    status = subprocess.run(command).returncode
    assert status in (0, -signal.SIGKILL)
    return status != 0


if __name__ == "__main__":
    names = vars(importlib.import_module(sys.argv[2]))
    crash_at(int(sys.argv[1]))
    exec(sys.argv[3], names)
    os._exit(0)
