"""What cannot be trained ends as a Failed job at once, with the reason in `status`."""

import shutil

import pytest
from support.cluster_jobs import PODS, TINY, Job
from support.waiting import until

OPTIONS = (*PODS, "--replicas=2")


@pytest.fixture
def job(prepared):
    """Submit a job: job(name, steps, *options, flags=...) -> Job; deleted at the end."""
    made = []

    def submit(name: str, steps: int, *options: str, flags: tuple[str, ...] = ()) -> Job:
        made.append(Job(prepared, name))
        made[-1].submit(*OPTIONS, *options, "--", *TINY, f"--steps={steps}", *flags)
        return made[-1]

    yield submit
    for it in made:
        it.cli("delete", code=None)


@pytest.fixture(scope="module")
def finished(prepared) -> Job:
    """A run of three steps, whose job has ended and is deleted."""
    it = Job(prepared, "finished")
    it.submit(*OPTIONS, "--", *TINY, "--steps=3")
    it.cli("wait", "--timeout=200")
    it.cli("delete")
    return it


def failed(job: Job, reason: str) -> None:
    """The job is Failed with no pod made again, and both `wait` and `status` say why."""
    waited = job.cli("wait", "--timeout=200", code=100)
    assert reason in waited.stderr
    assert job.condition("Failed")
    assert reason in job.cli("status").stdout
    for pod in job.pods():
        for status in pod["status"].get("containerStatuses", []):
            assert status["restartCount"] == 0


def test_a_dataset_that_is_not_there(job):
    """The trainer's exit code 2 fails the job."""
    it = job("nodata", 5, "--data=data/none")
    failed(it, "/data/none")


def test_a_damaged_dataset(job, prepared):
    """A torn shard is named, and nothing is trained on the rest of it."""
    torn = prepared.shared / "data/torn"
    shutil.copytree(prepared.shared / "data/corpus", torn)
    shard = next(torn.glob("train/*.parquet"))
    shard.write_bytes(shard.read_bytes()[:-100])
    it = job("torn", 5, "--data=data/torn")
    failed(it, shard.name)


def test_a_configuration_that_contradicts_the_run(job, finished):
    """A run directory of another configuration: the difference is the reason."""
    again = job(finished.name, 3, flags=("--seed=99",))
    failed(again, "seed: 1337 -> 99")


def test_checkpoints_that_are_all_broken(job, finished):
    """Exit code 4: the run is never begun anew in silence."""
    shards = list(finished.run.glob("checkpoints/step-*/*.bin"))
    for shard in shards:
        shard.write_bytes(b"\0" * shard.stat().st_size)
    assert shards
    again = job(finished.name, 5)
    failed(again, "none is valid")


def test_an_image_that_does_not_exist_is_told(job):
    """Not a failure, as a registry may come back: `status` names the pods and the image."""
    it = job("noimage", 3, "--image=gptddp:none")
    until(lambda: "gptddp:none" in it.cli("status").stdout, "the image named", 90, poll_s=2)
    it.cli("wait", "--timeout=1", code=124)


def test_a_claim_that_does_not_exist_is_refused(prepared):
    """Before anything is created."""
    it = Job(prepared, "noclaim")
    refused = it.submit(*OPTIONS, "--data=nowhere", "--", *TINY, code=2)
    assert "nowhere" in refused.stderr
    assert "noclaim" not in prepared.kubectl("get", "pytorchjobs", "-o", "name").stdout


def test_pods_that_are_not_admitted_are_told(prepared):
    """A quota refuses the pods: the job has no status, and the reason is in its events."""
    it = Job(prepared, "quota")
    prepared.kubectl("create", "quota", "tight", "--hard=pods=0")
    try:
        it.submit(*OPTIONS, "--", *TINY, "--steps=3")
        why = "quota: tight"
        until(lambda: why in it.cli("status").stdout, "the quota named", 60, poll_s=2)
    finally:
        prepared.kubectl("delete", "quota", "tight")
        it.cli("delete", code=None)
