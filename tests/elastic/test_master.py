"""Launchers in a PyTorchJob with a Master and without elasticPolicy: a job of a fixed size."""

import signal

import pytest
from support.launchers import PORT, Training, undisturbed
from support.same_bits import check_same_bits

STEPS = 60


class MasterJob(Training):
    """Pod 0 is the Master; the environment is as in `pt/envvar.go`, where RANK numbers the pods."""

    def operator_env(self, i: int) -> dict[str, str]:
        host = f"{self.prefix}.100"
        return {
            "PET_NNODES": str(self.size),
            "PET_MASTER_ADDR": host,
            "PET_MASTER_PORT": str(PORT),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(PORT),
            "PET_NODE_RANK": str(i),
            "RANK": str(i),
            "WORLD_SIZE": str(self.size),
        }


@pytest.fixture
def job(tmp_path, corpus):
    made = MasterJob(tmp_path / "run", corpus, 3, 41, 3, "--steps", str(STEPS))
    yield made
    made.close()


def test_a_lost_worker_and_a_lost_master_change_no_bit(tmp_path, corpus, job):
    """Both are killed and replaced: three pods do every step, with the undisturbed run's bits."""
    job.whole()
    for lost in (2, 0):
        job.pods[lost].send_signal(signal.SIGKILL)
        job.exit_code(lost)
        job.whole()
    lines = job.finish()
    assert {line["world_size"] for line in lines} == {3}
    undisturbed(tmp_path / "alone", corpus, 3, STEPS)
    check_same_bits(job.folder, tmp_path / "alone")
