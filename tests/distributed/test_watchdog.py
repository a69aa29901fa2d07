"""The thread that ends a process when the main thread cannot, without a trainer."""

import select
import signal
import subprocess
import sys
import time

import pytest

from gptddp.grace import KILL_S, LAUNCHER_S, WORKER_S, limit_s

SETUP = """
import ctypes, os, signal, sys, time
from gptddp.distributed.watchdog import Watchdog
def stuck():
    mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    os.write(1, b"stuck")
    lock(mutex)
"""


@pytest.fixture
def watched(spawn):
    """watched(code): a process that runs the code after SETUP, and has printed its first line."""
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)

    def begin(code, **options):
        process = spawn([sys.executable, "-c", SETUP + code], **pipes, **options)
        assert select.select([process.stdout], [], [], 30)[0]
        return process

    return begin


def ended(process):
    """Exit code and output."""
    process.wait(20)
    return process.returncode, process.stdout.read(), process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_process_exits_although_its_main_thread_is_in_c(watched, number):
    """The process exits in time, with 128 + the number of the first signal."""
    process = watched("""
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whatever the tests were started by, such as nohup
dog = Watchdog(lambda waited_s: waited_s > 1.2, lambda: os.write(1, b" heard"))
stuck()
""")
    process.send_signal(number)
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    code, out, err = ended(process)
    assert (code, out) == (128 + number, b"stuck heard")
    assert err.decode().startswith("gptddp: exits 1.") and signal.Signals(number).name in str(err)


def test_a_failing_or_hanging_callback_does_not_block_the_exit(watched):
    """Neither a callback that raises nor a full pipe without a reader blocks the exit."""
    process = watched("""
os.set_blocking(2, False)
try:
    while os.write(2, b"x" * 4096): pass
except BlockingIOError:
    os.set_blocking(2, True)
dog = Watchdog(lambda waited_s: waited_s > 1.0, lambda: 1 / 0)
os.write(1, b"ready ")
stuck()
""")
    process.terminate()
    assert process.wait(20) == 143


def test_a_second_ctrl_c_exits_at_once_if_allowed(watched):
    """With `hurried` the second signal ends the process; without it the process keeps its time."""
    code = "\ndog = Watchdog(lambda waited_s: waited_s > {}, hurried={})\nstuck()\n"
    for most_s, hurried in ((60, "[signal.SIGINT]"), (1, "()")):
        process = watched(code.format(most_s, hurried))
        begin = time.monotonic()
        for _ in range(2):
            process.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert ended(process)[0] == 130
    assert time.monotonic() - begin > 1


def test_a_closed_watchdog_does_not_exit(watched):
    """A signal at the end of a process is noted, and does not change its exit code."""
    process = watched("""
dog = Watchdog(lambda waited_s: True)
dog.close()
os.write(1, b"closed")
while not dog.number: time.sleep(0.01)
time.sleep(0.3)
""")
    process.terminate()
    assert ended(process)[0] == 0


def test_an_ignored_sighup_stays_ignored(watched):
    """Under nohup the end of the terminal does not end the process."""
    process = watched(
        "\ndog = Watchdog(lambda waited_s: True)\nos.write(1, b'here')\ntime.sleep(0.5)\n",
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    process.send_signal(signal.SIGHUP)
    assert ended(process)[0] == 0


@pytest.mark.parametrize("grace_s", [1, 5, 10, 30, 60, 3600])
def test_a_worker_exits_before_its_kill_and_its_launcher_before_the_kubelet_acts(grace_s):
    """Worker, kill and launcher each have their own part of any grace period."""
    limits = [limit_s(grace_s, margin_s) for margin_s in (WORKER_S, KILL_S, LAUNCHER_S)]
    assert 0.5 * grace_s <= limits[0] < limits[1] < limits[2] < grace_s
    assert limits[2] <= max(grace_s - 3, 0.82 * grace_s)
