"""Own code on a real cluster: a job trains with it, and never with code that others put there."""

import base64
import os
import shutil
import time
from pathlib import Path

import pytest
from support.cluster_jobs import PODS, TINY, Job, cli
from support.waiting import until

import gptddp
from gptddp.checkpoint import store
from gptddp.launch import bundle
from gptddp.run.history import read_ledger

JOB = [*PODS, "--replicas=2", f"--patch={Path(__file__).with_name('apart.yaml')}"]
FLAGS = [*TINY, "--steps=100000", "--checkpoint-every=1"]
MARK = '\nprint("this is the {} edit", flush=True)\n'


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """own(word, nbytes): --code of a folder with a file, and our module that prints the word.

    With a file of 800 kB the folder needs two ConfigMaps.
    """
    folder = tmp_path_factory.mktemp("own")
    module = Path(gptddp.__file__).parent / "model/gpt.py"
    (folder / "gptddp/model").mkdir(parents=True)

    def write(word, nbytes=0):
        (folder / "table.py").write_text("#" + os.urandom(nbytes).hex())
        place = folder / "gptddp/model/gpt.py"
        shutil.copy(module, place)
        with place.open("a") as file:
            file.write(MARK.format(word))
        return f"--code={folder}"

    return write


@pytest.fixture(scope="module")
def job(prepared, own):
    """A job of two pods that trains with the first edit."""
    it = Job(prepared, "own")
    it.submit(*JOB, own("first", 800_000), "--", *FLAGS)
    it.reach(1, world_size=2)
    yield it
    it.cli("delete", code=None)


def starts(job):
    return [event for event in read_ledger(job.run) if event["event"] == "start"]


def test_edited_code_runs_after_a_new_submit_and_is_recorded(job, own):
    """Edited code is refused as another job. After a delete, the run continues with it within a
    minute. The ledger records the change, and each checkpoint its code."""
    assert "this is the first edit" in job.cli("logs").stdout
    edited = own("second")
    refused = job.submit(*JOB, edited, "--", *FLAGS, code=2)
    assert "code[gptddp/model/gpt.py]: " in refused.stderr
    began = time.time()
    job.cli("delete")
    before = job.last_step()
    job.submit(*JOB, edited, "--", *FLAGS)
    line = job.reach(before, world_size=2, after=max(job.lives()))
    took_s = line["time"] - began
    print(f"from delete over submit to the first step: {took_s:.1f} s")
    assert took_s < 60  # the processors of the pods have other work
    text = job.cli("logs").stdout
    assert "this is the second edit" in text and "code: own code " in text

    until(lambda: len(starts(job)) > 1, "the start of the second life", 30)
    codes = [event["code"] for event in starts(job)]
    assert len(set(codes)) == 2 and all(len(code) == 64 for code in codes)
    changed = [event for event in read_ledger(job.run) if event["event"] == "changed"]
    assert [(e["field"], e["old"], e["new"]) for e in changed] == [("code", *codes)]

    def saved():
        names = [name for name in store.names(job.run) if store.order(name)[0] > 1]
        return names and store.unsealed(job.run / "checkpoints" / names[0])

    assert until(saved, "a checkpoint of the second life", 60)["code"] == codes[1]


def test_a_sample_is_made_by_the_code_of_the_job(job):
    """The Job of `sample` unpacks the code of the training job over the image."""
    sampled = cli(job.namespace, "sample", job.name, "--prompt", "import", "--tokens", "3")
    assert "this is the second edit" in sampled.stdout


def test_a_new_pod_runs_the_submitted_code_or_none(job):
    """A pod that replaces another runs the same code. If somebody has put other code in its place,
    the pod does not run it, and the job fails with the reason. The code is deleted with the job."""
    job.recover(lambda: job.namespace.kubectl("delete", "pod", "own-worker-1"), world_size=2)
    assert len({event["code"] for event in starts(job)[1:]}) == 1
    (config_map,) = job.namespace.get("configmap", "-l", "app.kubernetes.io/component=code")
    meta = config_map["metadata"]
    forged = base64.b64encode(bundle.pack({"mine.py": bundle.File(b"x = 1\n")})).decode()
    kept = {"name": meta["name"], "labels": meta["labels"]}
    kept["ownerReferences"] = meta["ownerReferences"]
    data = dict.fromkeys(config_map["binaryData"], forged)
    job.namespace.kubectl("delete", "configmap", meta["name"])
    head = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": kept}
    job.namespace.kubectl("create", "-f", "-", stdin={**head, "binaryData": data})
    job.namespace.kubectl("delete", "pod", "own-worker-1")
    failed = until(lambda: job.condition("Failed"), "the job to fail", 60)
    assert failed is not None
    said = job.cli("status", code=None)
    assert "is not what the job was submitted with" in said.stdout + said.stderr
    job.cli("delete")
    until(
        lambda: not job.namespace.get("configmap", "-l", "app.kubernetes.io/component=code"),
        "the code to go with its job",
        30,
    )
