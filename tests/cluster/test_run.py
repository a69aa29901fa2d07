"""A whole run as a user does it: prepare, submit, watch, sample. It has the bits of one process."""

import itertools
import json
import os
import re
import subprocess
import sys

import pytest
from support.cluster_jobs import PODS, TINY, Job, cli
from support.same_bits import check_same_bits
from support.waiting import until

STEPS = 150
FLAGS = [*TINY, f"--steps={STEPS}", "--seed=7"]


@pytest.fixture(scope="module")
def job(prepared):
    """A job of four pods that ends by itself."""
    it = Job(prepared, "whole")
    created = it.submit(*PODS, "--replicas=4", "--", *FLAGS)
    assert created.stdout.startswith("pytorchjob.kubeflow.org/whole created")
    it.reach(5, timeout_s=300)
    return it


def test_the_logs_show_the_training(job):
    """Each line names its pod, and rank 0 logs the number of ranks; one pod's lines are plain."""
    text = job.cli("logs").stdout
    assert re.search(r"^\[w0\] .*fp32 on cpu, 4 ranks", text, re.M)
    alone = job.cli("logs", "--pod=0").stdout
    assert "4 ranks" in alone and "[w0]" not in alone


def test_metrics_are_scraped_from_worker_0(job):
    """Through the pod's port, as Prometheus does: the step and the world of the running job."""
    place = f"/api/v1/namespaces/{job.namespace.namespace}/pods/whole-worker-0:9464/proxy/metrics"
    text = job.namespace.kubectl("get", "--raw", place).stdout
    assert float(re.search(r"^gptddp_world_size.* (\S+)$", text, re.M)[1]) == 4
    assert float(re.search(r"^gptddp_step(?:\{.*\})? (\S+)$", text, re.M)[1]) >= 1


def test_a_rendered_job_is_the_submitted_one(job):
    """`render | kubectl apply -f -` would change nothing in the live job."""
    options = ["--name=whole", *PODS, "--replicas=4", "--", *FLAGS]
    text = cli(job.namespace, "render", *options).stdout
    apply = ["apply", "--server-side", "--force-conflicts", "--dry-run=server", "-o", "json"]
    applied = job.namespace.kubectl(*apply, "-f", "-", stdin=text).stdout
    (after,) = [o for o in json.loads(applied)["items"] if o["kind"] == "PyTorchJob"]
    live = job.namespace.get("pytorchjob", "whole")
    assert after["spec"] == live["spec"]
    assert after["metadata"]["annotations"] == live["metadata"]["annotations"]


def test_it_succeeds_with_its_checkpoint_on_the_shared_volume(job):
    """`wait` ends with 0 as soon as the job has succeeded; the last step's checkpoint is there."""
    job.cli("wait", "--timeout=300")
    assert job.condition("Succeeded")
    (checkpoint,) = (job.run / "checkpoints").glob(f"step-{STEPS:012}.*")
    assert (checkpoint / "manifest.json").exists()
    until(lambda: not any(p["status"]["phase"] == "Running" for p in job.pods()), "no pods", 60)


def test_the_run_has_the_bits_of_one_process(job, tmp_path):
    """Every number and tensor is that of one process on this machine, bit for bit."""
    command = [sys.executable, "-m", "gptddp.train", *FLAGS, "--data"]
    command += [str(job.namespace.shared / "data/corpus")]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command += ["--run-dir", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, env=env)
    check_same_bits(job.run, tmp_path)


def test_the_log_of_the_run_outlives_it(job):
    """worker-0 exits before all other pods, so its log is kept when they are deleted."""
    text = job.cli("logs").stdout
    assert re.search(rf"^\[w0\] finished after step {STEPS}", text, re.M)


def test_sample_prints_text_of_the_newest_checkpoint(job):
    """A short Job prints the text and is gone; nobody has to exec into a pod."""
    text = job.cli("sample", "--tokens=40", "--prompt=def ").stdout
    assert text.startswith("def ") and len(text) > 20
    assert "sample" not in job.namespace.kubectl("get", "jobs", "-o", "name").stdout


def test_a_job_without_data_fails_at_once(prepared):
    """The trainer exits with 2: no pod restarts, and both `wait` and `status` give the reason."""
    it = Job(prepared, "nodata")
    it.submit(*PODS, "--data=data/none", "--replicas=2", "--", *FLAGS)
    try:
        assert "/data/none" in it.cli("wait", "--timeout=200", code=100).stderr
        assert it.condition("Failed") and "/data/none" in it.cli("status").stdout
        statuses = [pod["status"].get("containerStatuses", []) for pod in it.pods()]
        assert all(status["restartCount"] == 0 for status in itertools.chain(*statuses))
    finally:
        it.cli("delete", code=None)
