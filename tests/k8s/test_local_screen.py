"""Local jobs: what their user sees, and what is refused."""

import json
import sys
from pathlib import Path

import pytest
import yaml
from support.local_jobs import job
from support.manifests import pod_spec

from gptddp.config import Config
from gptddp.errors import ConfigError, DataError
from gptddp.k8s.local import pods, run, runner
from gptddp.k8s.local.replica import Network
from gptddp.k8s.local.screen import StepFeed
from gptddp.k8s.render import manifest, spec

# -- what the user sees ------------------------------------------------------------------------


def test_logs_are_kept_as_written_and_shown_with_a_prefix(finish, tmp_path):
    """`-v` prints `[worker-i] line` on stdout; the files have the bare lines of all lives."""
    code = """
if not first: time.sleep(60)
print("out"); print("err", file=sys.stderr); sys.stdout.write("no end of line")
sys.stdout.flush(); time.sleep(0.3)
sys.exit(143 if once("a") else 0)
"""
    exit_code, out, err = finish(job(code), "-v")
    assert exit_code == 0
    assert "[worker-0] out\n[worker-0] err\n" in out
    assert "out" not in err
    log = tmp_path / "local" / "jobs" / "job" / "logs" / "job-worker-0.log"
    assert log.read_text() == 2 * "out\nerr\nno end of line"
    assert out.count("[worker-0] err") == 2


def test_a_closed_output_does_not_end_the_job(start, tmp_path):
    """Whoever reads `submit -v | head` may go; the job goes on to its own exit code."""
    code = "\nfor _ in range(40): print('x' * 99, flush=True); time.sleep(0.02)\n"
    process = start(job(code, replicas=1), "-v")
    process.stdout.close(), process.stderr.close()
    assert process.wait(20) == 0
    process.stdout = process.stderr = None


def test_the_progress_line_reads_the_newest_generation(tmp_path):
    """Step, loss and speed come from the last whole line of the highest generation; then an ETA."""
    feed = StepFeed(tmp_path, Config(steps=100))
    assert feed.line(0) == ""
    (tmp_path / "log.9.jsonl").write_text('{"step": 50, "loss": 1.0}\n')
    newest = tmp_path / "log.10.jsonl"
    newest.write_text('{"step": 9, "loss": 2.5, "tok_s": 45210.3}\n{"step": 10, "lo')
    assert feed.line(0) == "step 9/100  loss 2.500  45,210 tok/s"
    for now, step in ((10, 20), (20, 40)):
        newest.write_text(json.dumps({"step": step, "loss": None}) + "\n")
        line = feed.line(now)
    assert line == "step 40/100  ETA 0:30"


def test_the_progress_line_ends_with_the_budget_that_ends_the_run(tmp_path):
    """The end is an estimate where that is a budget of tokens or time, and so is the ETA."""
    feed = StepFeed(tmp_path, Config(steps=100, max_tokens=600, max_time=40.0))
    log, shown = tmp_path / "log.1.jsonl", []
    for now, step in ((0, 4), (10, 10), (20, 20)):
        log.write_text(json.dumps({"step": step, "tokens": 10 * step, "train_s": step}) + "\n")
        shown.append(feed.line(now))
    assert shown[-2:] == ["step 10/~40", "step 20/~40  ETA 0:20"]
    log.write_text('{"step": 21, "tokens": -1, "train_s": NaN}\n')
    assert feed.line(21).startswith("step 21/100  ")


def test_the_progress_of_a_run_that_is_continued_ends_at_its_own_steps(tmp_path):
    """Those that are given, else those of the run, else the preset's."""
    steps = []
    for args in ([], ["--steps", "9"]):
        built = manifest.objects(spec.load(None, {}, args))[-1]
        (plan,) = pods.plan(built, Network("127.99.1", 1), tmp_path, {"runs": tmp_path}, tmp_path)
        for content in ("null", "{", '{"config": {"steps": 77}}'):
            (tmp_path / "gptddp").mkdir(exist_ok=True)
            (tmp_path / "gptddp/config.json").write_text(content)
            steps.append(runner._step_feed(plan).config.steps)
    assert steps == [400, 400, 77, 9, 9, 9]


# -- refusals ----------------------------------------------------------------------------------


def test_a_missing_dataset_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    """The message has the command that makes one, with the folder in which it is looked for."""
    monkeypatch.chdir(tmp_path)
    rendered = manifest.objects(spec.load(None, {"data": "corpus/small"}, []))
    with pytest.raises(DataError, match=r"gptddp prepare .* --out local/volumes/corpus/small"):
        run.run(rendered, local_dir=Path("local"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="--out elsewhere/small"):
        run.run(rendered, local_dir=Path("local"), volumes={"corpus": Path("elsewhere")})


def edited(path, value):
    """A job with one field of its pod's spec (or of the job, from `job.`) replaced."""
    built = job()
    *parents, last = path.split(".")
    where = built if parents[:1] == ["job"] else None
    where = where or pod_spec(built)
    for key in parents[parents[:1] == ["job"] :]:
        where = where[int(key) if key.isdigit() else key]
    where[int(last) if last.isdigit() else last] = value
    return built


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("initContainers", [{"name": "x", "image": "y"}], "initContainers"),
        ("volumes.3", {"name": "shm", "csi": {"driver": "d"}}, "no volume of the kind csi"),
        (
            "volumes.3",
            {"name": "shm", "secret": {"secretName": "t"}},
            "Secret t: .*--volume t=FOLDER",
        ),
        (
            "volumes.3",
            {"name": "shm", "configMap": {"name": "t"}},
            "ConfigMap t: .*--volume t=FOLDER",
        ),
        ("volumes", [], "no volume is named 'data'"),
        (
            "containers.0.env",
            [{"name": "AB_C", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
            "AB_C is in the Secret s, .*: export AB_C in this shell",
        ),
        (
            "containers.0.env",
            [{"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}}],
            "cannot set A from resourceFieldRef",
        ),
        ("containers.0.resources", {"limits": {"nvidia.com/gpu": 99}}, "need 198 GPUs"),
        ("job.spec.runPolicy.suspend", True, "suspend"),
        ("job.spec.pytorchReplicaSpecs.Worker.replicas", 151, "use at most 150 --replicas"),
        ("job.kind", "Job", "0 objects of kind PyTorchJob"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(tmp_path, path, value, message):
    """Nothing is started and nothing written for a manifest that would not behave as written."""
    with pytest.raises(ConfigError, match=message):
        run.run([edited(path, value)], local_dir=tmp_path / "local")
    assert not (tmp_path / "local").exists()


def test_a_claim_or_a_folder_that_cannot_be_is_refused(tmp_path):
    """A misspelt claim of --volume, and a --local-dir where nothing can be written."""
    with pytest.raises(ConfigError, match="no such claim: did you mean 'data'"):
        run.run([job()], local_dir=tmp_path, volumes={"dta": tmp_path})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot run in .*choose another --local-dir"):
        run.run([job()], local_dir=tmp_path / "file")


def test_other_systems_are_told_what_is_missing(monkeypatch):
    """On a Mac the refusal names what does not work there, and the way out."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"needs Linux.*loopback.*gptddp train"):
        run.run([job()])


def test_a_manifest_is_the_same_after_a_round_through_yaml():
    """What `render` prints and what `submit --local` runs are one and the same."""
    built = job()
    assert yaml.safe_load(manifest.to_yaml([built])) == built
