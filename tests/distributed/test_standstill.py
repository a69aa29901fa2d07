"""When a group gives a collective up, and the reason that it gives."""

import os
import queue
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from gptddp.distributed import group
from gptddp.errors import Broken


def test_a_broken_world_has_a_reason_if_its_launcher_has_withdrawn_the_request():
    """An error without a text could not be logged, and would end the life."""
    broken = SimpleNamespace(is_broken=True, _why=lambda: "")
    broken._broken = lambda: group.Group._broken(broken)
    with pytest.raises(Broken, match="the world has changed"):
        group.Group.check(broken)


def test_a_collective_is_given_up_only_if_gloo_stands_still(monkeypatch):
    """A thread of gloo that has run since the last look may be writing received data."""
    looks = iter(["", "1", "", "1", "2", "2"])
    here = object.__new__(group.Group)
    here._device, here._forgotten, here.view = torch.device("cpu"), [], None
    monkeypatch.setattr(here, "_standstill", lambda: next(looks))

    def wait(limit):
        raise RuntimeError("Operation timed out!")

    for _ in range(2):  # a collective begun after it is given up at once
        with pytest.raises(Broken):
            here.wait(SimpleNamespace(is_completed=lambda: False, wait=wait))
        looks = iter([""])
    assert len(here._forgotten) == 2


def test_a_running_thread_does_not_stand_still():
    """Only a sleeping thread has a constant CPU time."""
    tasks, done = queue.Queue(), threading.Event()

    def sleep():
        tasks.put(threading.get_native_id())
        done.wait()

    thread = threading.Thread(target=sleep)
    thread.start()
    task, end = tasks.get(), time.monotonic() + 10
    while not group._asleep(task) and time.monotonic() < end:
        time.sleep(0.01)
    asleep, awake = group._asleep(task), group._asleep(os.getpid())
    done.set()
    thread.join()
    assert asleep and not awake
