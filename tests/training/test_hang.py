"""A trainer that hangs alone, without peers and a launcher."""

import os
import re
import subprocess

import pytest
from support.forked import fork
from support.toy import SMALL
from support.trainer_patches import HELPERS

from gptddp.distributed import pulse
from gptddp.run.history import history, read_ledger

# A second without progress is a hang, once the run has begun.
QUICK = """
from gptddp.distributed import connect as c, pulse
c.TIMEOUT_S, c.cpu_quota, pulse.MARGIN_S, pulse.POLL_S = 0.3, lambda: 1, 0.7, 0.05
c.FIRST_TIMEOUT_S = LIMIT
"""
FORWARD = """
_forward_backward = forward_backward
def forward_backward(ddp, batch, targets, step, *rest):
    if step == 6 and times('hang', TIMES):
        time.sleep(100)
    return _forward_backward(ddp, batch, targets, step, *rest)
"""
DATA = """
from gptddp.training import quarantine
_next = quarantine.next_batch
def next_batch(loader, *args):
    if len(list(HERE.glob('batch.*'))) == 4 and times('hang', TIMES):
        time.sleep(100)
    times('batch', 1000)
    return _next(loader, *args)
quarantine.next_batch = next_batch
"""
START = """
_settle_buckets = settle_buckets
def settle_buckets(*args):
    if times('hang', TIMES):
        time.sleep(100)
    return _settle_buckets(*args)
"""
SLOW = """
from gptddp.data.blocks import Source
_encoder, _of_step = Source.encoder, of_step
def encoder(self):
    encode = _encoder(self)
    def slowly(document):
        time.sleep(0.4 * times('document', 5))
        return encode(document)
    return slowly
Source.encoder = encoder
def of_step(*args):
    for made in _of_step(*args):
        time.sleep(0.4 * times('micro-batch', 4))
        yield made
"""
# The read of a row group, of training and then of validation, takes longer than the limit.
VOLUME = """
from gptddp.data.dataset import Dataset
from gptddp.distributed import storage
storage.FIRST_LINE_S = 0.2
_read = Dataset.read
def read(self, row_group):
    split = row_group.path.split('/')[0]
    time.sleep(times(split, TIMES) * (2.6 if split == 'train' else 1.2))
    return _read(self, row_group)
Dataset.read = read
"""
STUCK = """
from gptddp.distributed import storage
storage.MOST_S = 0.3
""" + DATA.replace("time.sleep(100)", "with storage.waiting(lambda: 'a file'): time.sleep(100)")
STEPS = 12


@pytest.fixture
def life(corpus, tmp_path):
    """life(code, times, first_s): a process that trains; its exit code and output."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("GPTDDP_", "SLURM_"))}
    flags = [*SMALL, "--data", str(corpus), "--steps", str(STEPS), "--eval-every", "1000"]
    run = "\nfrom gptddp.distributed.process import run; run(train.main)"

    def train(code="", times=0, first_s=20.0, folder="run"):
        (tmp_path / "patch").mkdir(exist_ok=True)
        text = HELPERS.format(here=str(tmp_path / "patch")) + QUICK + code
        text = text.replace("LIMIT", str(first_s)).replace("TIMES", str(times))
        patch = f"from gptddp import train\nexec({text!r}, vars(train))\n"
        process = fork(patch + run, *flags, "--run-dir", str(tmp_path / folder), env=env)
        try:
            return process.wait(60), process.stderr.read()
        except subprocess.TimeoutExpired:
            raise AssertionError(process.stderr.read()) from None
        finally:
            process.kill()

    return train


def test_a_hanging_process_saves_its_state_and_the_run_continues(life, tmp_path):
    """A hang in the data or in the model gives exit code 1 with the place; no step is repeated."""
    for code, where in ((DATA, "next_batch"), (FORWARD, "forward_backward")):
        exit_code, said = life(code, times=1)
        assert exit_code == pulse.HUNG
        assert "[rank 0] no progress for " in said
        assert f" s: hangs in {where} (<string>:" in said
        (tmp_path / "patch" / "hang.0").unlink()
    assert life()[0] == 0 and life(folder="undisturbed")[0] == 0
    events = read_ledger(tmp_path / "run")
    starts = [(e["step"], e["source"], e["redo"]) for e in events if e["event"] == "start"]
    assert starts == [(0, "scratch", 0), (0, "scratch", 4), (0, "scratch", 6)]
    first, second = (e for e in events if e["event"] == "end")
    assert first["step"] == 4 and "it hangs in next_batch" in first["cause"]
    assert second["step"] == 6 and "it hangs in forward_backward" in second["cause"]
    lines, wanted = history(tmp_path / "run"), history(tmp_path / "undisturbed")
    assert [line["chain_fp"] for line in lines] == [line["chain_fp"] for line in wanted]


def test_the_third_hang_at_a_step_ends_the_run(life):
    """The third hang gives exit code 5 and the place, because retries have a limit."""
    assert [life(FORWARD, times=3, first_s=1.0)[0] for _ in range(2)] == [1, 1]
    code, said = life(FORWARD, times=3, first_s=1.0)
    assert code == 5
    assert "step 7 failed 3 times" in said and "it hangs in forward_backward" in said


def test_slow_documents_and_slow_micro_batches_are_no_hang(life):
    """A block, and a step, may take longer than the limit, as long as they make progress."""
    code, said = life(SLOW, first_s=0.3)
    assert code == 0 and "no progress" not in said, said


def test_the_trainer_waits_for_a_slow_volume_and_names_it(life, tmp_path):
    """A read may take longer than any limit, on the way to the first step and at an evaluation."""
    code, said = life(VOLUME, times=1, first_s=0.3)
    assert code == 0 and "no progress" not in said, said
    for split in ("train", "val"):
        assert re.search(rf"waiting for the storage: reading \S+/{split}/0+.parquet, row gr", said)


def test_a_volume_that_does_not_answer_is_no_error_of_the_trainer(life, tmp_path):
    """After an hour the process ends, and saves its state; the end is not counted."""
    code, said = life(STUCK, times=1)
    assert code == 1 and "no progress for " in said
    assert life()[0] == 0 and not (tmp_path / "run" / "faults").exists()
    (event,) = (e for e in read_ledger(tmp_path / "run") if e["event"] == "end")
    assert event["step"] == 4 and "waiting for a file" in event["cause"]


def test_a_hang_before_the_first_step_is_not_counted(life, tmp_path):
    """A volume may recover: the next life continues as if nothing had failed."""
    code, said = life(START, times=1, first_s=0.3)
    assert code == 1 and "hangs in settle_buckets (<string>:" in said
    assert life()[0] == 0
    assert not (tmp_path / "run" / "faults").exists()
