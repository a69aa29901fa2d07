"""Processes that are killed at a system call."""

import importlib
import os
import signal
import traceback

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
    """Run the code in a fork. True: it was killed; False: it made fewer than n system calls."""
    names = dict(vars(importlib.import_module(module)))
    if not (pid := os.fork()):
        try:
            crash_at(number)
            exec(code, names)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0
