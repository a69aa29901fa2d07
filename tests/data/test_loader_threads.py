"""The loader's threads: their end, and how far they work ahead."""

import os
import subprocess
import sys
import threading
import time

import pytest
from support import loaders
from support.loaders import LANES, Dataset, corpus, open_loader
from support.waiting import until

from gptddp.data import blocks
from gptddp.data.loader import Loader
from gptddp.data.producer import URGENT_STEPS
from gptddp.errors import DataError


def threads_of_loaders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("gptddp-data")]


def test_close_ends_the_threads():
    """close() joins the threads, a second call is harmless, and a later next() raises an error."""
    loader = Loader(corpus(), lanes=8, batch=8, seq_len=16, seed=1, threads=3)
    loader.next()
    assert len(threads_of_loaders()) == 3
    loader.close()
    loader.close()
    assert threads_of_loaders() == []
    with pytest.raises(RuntimeError, match="closed"):
        while True:
            loader.next()


def test_a_loader_that_is_dropped_ends_its_threads():
    """Threads do not keep a forgotten loader alive."""
    loader = Loader(corpus(), lanes=8, batch=8, seq_len=16, seed=1)
    loader.next()
    del loader
    assert threads_of_loaders() == []


def test_close_does_not_wait_for_a_retry(monkeypatch):
    """The waits between attempts end at once when the loader is closed."""
    monkeypatch.setattr(blocks, "RETRY_S", (60.0,))
    dataset = corpus()
    failing = threading.Event()

    def fail(group, attempt):
        failing.set()
        raise DataError("gone")

    dataset.fail = fail
    loader = Loader(dataset, lanes=8, batch=8, seq_len=16, seed=1)
    assert failing.wait(30)
    started = time.monotonic()
    loader.close()
    assert time.monotonic() - started < 20
    assert threads_of_loaders() == []


@pytest.mark.parametrize("how", ["end", "raise", "slow read"])
def test_a_process_ends_with_a_loader_open(how):
    """The interpreter exits without a hang and without messages while threads work."""
    child = subprocess.run(
        [sys.executable, loaders.__file__, how],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert child.returncode == (1 if how == "raise" else 0)
    expected = ["Traceback", "ZeroDivisionError"] if how == "raise" else []
    lines = [line for line in child.stderr.splitlines() if not line.startswith(" ")]
    assert [line.split()[0].rstrip(":") for line in lines] == expected


def test_only_a_bounded_number_of_blocks_is_made_ahead():
    """Without calls of next() about `prefetch` blocks per lane are made, without a busy loop."""
    text = "words of a document " * 20
    dataset = Dataset([[text] * 10 for _ in range(400)])
    with open_loader(dataset, prefetch=1.5, batch=LANES) as loader:
        loader.next()
        for _ in range(100):
            before = sum(dataset.reads.values())
            time.sleep(0.1)
            if sum(dataset.reads.values()) == before:
                break
        assert LANES <= before <= 1.5 * LANES + 2
        cpu = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - cpu < 0.25
        assert sum(dataset.reads.values()) == before


def test_a_loader_is_ready_with_rows_for_a_few_steps():
    """One step's rows are not enough: a worker joins after a step or two more of the others."""
    dataset, goes_on = Dataset([["x" * 47]] * 4), threading.Event()
    second = threading.Event()

    def fail(group, attempt):
        if sum(dataset.reads.values()) > 1:
            second.set()
            goes_on.wait(30)

    dataset.fail = fail
    with open_loader(dataset, lanes=1, batch=1) as loader:
        assert second.wait(30)  # three rows are made
        assert not loader.is_ready()
        goes_on.set()
        while not loader.is_ready():
            time.sleep(0.01)


def test_a_loader_hurries_only_until_the_next_batch():
    """Rows for many steps are for a worker that joins; later they would slow the trainer down."""
    with open_loader(Dataset([["words of a document " * 20] * 10 for _ in range(400)])) as loader:
        loader.hurry(40)
        while not loader.is_ready():
            time.sleep(0.01)
        assert loader._producer.urgent_rows == 40 * 2
        assert all(it.rows >= 40 * 2 for it in loader._producer.lanes)
        loader.next()
        assert loader._producer.urgent_rows == URGENT_STEPS * 2


def test_a_hanging_read_of_a_lane_that_has_moved_away_delays_no_other_lane():
    """The other threads still make rows ahead."""
    dataset, goes_on = Dataset([["x" * 150] * 2 for _ in range(400)]), threading.Event()
    dataset.fail = lambda group, attempt: sum(dataset.reads.values()) > 1 or goes_on.wait(60)
    with open_loader(dataset, threads=2, prefetch=5.0, batch=LANES) as loader:
        until(lambda: dataset.reads, "a read")
        (hanging,) = (it for it in loader._producer._busy if it.reading and not it.rows)
        loader.move([lane for lane in range(LANES) if lane != hanging.number], None)
        lanes = loader._producer.lanes
        try:
            until(lambda: sum(len(it.ready) for it in lanes) > 3 * LANES, "more blocks", 20)
        finally:
            goes_on.set()
