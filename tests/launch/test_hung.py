"""What a launcher sees of a worker that cannot say anything itself."""

import os
import signal
import struct
import subprocess
import sys
import time

from gptddp.distributed import pulse
from gptddp.launch.hung import Pulses


def test_a_stopped_worker_is_told_once_when_its_next_beat_is_late(tmp_path):
    """With its step; not before it is late, not twice, and not where it is not stopped."""
    worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    told: list[tuple[int, int]] = []
    pulses = Pulses(tmp_path, lambda rank, step, seconds: told.append((rank, step)))

    def listen(beats: float, seconds: float) -> None:
        cells = struct.pack("5d", worker.pid, beats, 600.0, 7.0, 0.6)
        pulse.path_of(tmp_path, 0).write_bytes(cells)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert pulses.hanging([worker.pid]) == []
            time.sleep(0.05)

    try:
        listen(1, 1.0)
        assert told == []  # late, and not stopped
        os.kill(worker.pid, signal.SIGSTOP)
        listen(2, 0.4)
        assert told == []
        listen(2, 1.0)
        assert told == [(0, 7)]
        listen(3, 1.0)  # it went on, and is stopped once more
        assert told == [(0, 7), (0, 7)]
    finally:
        worker.kill()
        worker.communicate()
