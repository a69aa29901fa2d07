"""Local jobs: the screen, and refusals."""

import json
import sys
from pathlib import Path

import pytest
from support.local_jobs import job
from support.manifests import container, pod_spec, worker
from support.rank_0_lines import of_a_life

from gptddp.errors import ConfigError, DataError
from gptddp.k8s.local import run
from gptddp.k8s.local.screen import Progress
from gptddp.k8s.observe.world import NEVER
from gptddp.k8s.render import manifest, spec

# -- the screen --------------------------------------------------------------------------------


def test_logs_are_kept_as_written_and_shown_with_a_prefix(finish, tmp_path):
    """`-v` prints `[worker-i] line` on stdout; the files have the plain lines of all lives."""
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
    """The reader in `submit -v | head` ends; the job continues to its own exit code."""
    code = "\nfor _ in range(40): print('x' * 99, flush=True); time.sleep(0.02)\n"
    process = start(job(code, replicas=1), "-v")
    process.stdout.close(), process.stderr.close()
    assert process.wait(20) == 0
    process.stdout = process.stderr = None


def test_the_progress_line_has_the_newest_step_and_rank_0s_numbers(tmp_path):
    """The step is in the last whole line of the newest generation; rank 0's log has the rest."""
    log = tmp_path / "job-worker-0.log"
    progress, up = Progress([log], str(tmp_path)), {"worker-0": 1.0, "worker-1": 2.0}
    assert progress.parts(up | {"worker-1": NEVER}) == ["pods 1/2"]
    log.write_text("[0.3 s] opening the dataset\n")
    assert progress.parts(up) == ["opening the dataset", "pods 2/2"]
    assert progress.parts(dict.fromkeys(up, NEVER)) == ["pods 0/2"]  # no pod runs
    (tmp_path / "log.9.jsonl").write_text('{"step": 121, "loss": 1.0}\n')
    newest = tmp_path / "log.10.jsonl"
    newest.write_text('{"step": 1, "loss": 3.0, "tok_s": 45210.3}\n{"step": 10, "lo')
    log.write_text("")
    assert progress.parts(up) == ["step 1", "loss 3.0000", "pods 2/2", "45.2 k tok/s"]
    log.write_text("\n".join(of_a_life()[:-1]) + "\n")
    for step, loss in ((2, 2.0), (3, 1.0), (121, None)):
        newest.write_text(json.dumps({"step": step, "loss": loss}) + "\n")
        shown = "  ".join(progress.parts(up))
        at = f"loss {loss:.4f}  " if loss else ""
        assert shown.startswith(f"step {step}/400  {at}ETA 4 min 40 s  pods 2/2  44.0 k tok/s")
    assert "slow rank 3 (demo-worker-3) 2.1 times the median  last fault" in shown
    other = tmp_path / "job-worker-1.log"  # rank 0 moves to this pod
    other.write_text("step 130/400  loss 2.0  lr 1.00e-03  9.0 k tok/s  1 rank  ETA 30 s\n")
    shown = Progress([log, other], str(tmp_path)).parts(up)
    assert shown == ["step 121/400", "ETA 30 s", "pods 2/2", "9.0 k tok/s"]


def test_the_progress_line_begins_with_a_lost_pod(tmp_path):
    """The pod is named, and the old speed is not shown, until its ranks do steps again."""
    log = tmp_path / "log.1.jsonl"
    progress = Progress([tmp_path / "none"], str(tmp_path))

    def shown(world_size: int, at: float, **begun: float) -> list[str]:
        line = {"step": 9, "loss": 2.0, "tok_s": 5e3, "world_size": world_size, "time": at}
        log.write_text(json.dumps(line) + "\n")
        return progress.parts({"w0": 10.0, "w1": 11.0} | begun)

    assert shown(3, 20.0, w2=12.0) == ["step 9", "loss 2.0000", "pods 3/3", "5.0 k tok/s"]
    lost = ["2 of 3: w2 is being replaced", "step 9", "loss 2.0000", "pods 2/3"]
    assert shown(3, 20.0, w2=NEVER) == lost
    assert shown(2, 22.0, w2=NEVER) == [*lost, "5.0 k tok/s"]
    assert shown(3, 20.0, w2=21.0)[0] == shown(2, 30.0, w2=21.0)[0] == lost[0]
    assert shown(3, 31.0, w2=21.0)[0] == "step 9"
    assert shown(3, 9.0, w2=12.0) == ["step 9", "loss 2.0000", "pods 3/3"]  # of an earlier life


# -- refusals ----------------------------------------------------------------------------------


def test_a_missing_dataset_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    """The message has the command that makes one, and the expected folder."""
    monkeypatch.chdir(tmp_path)
    rendered = manifest.objects(spec.load(None, {"data": "corpus/small"}, []))
    with pytest.raises(DataError, match=r"gptddp prepare .* --out local/volumes/corpus/small"):
        run.run(rendered, local_dir=Path("local"))
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="--out elsewhere/small"):
        run.run(rendered, local_dir=Path("local"), volumes={"corpus": Path("elsewhere")})


SECRET = {"name": "AB_C", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}


@pytest.mark.parametrize(
    ("where", "change", "message"),
    [
        (pod_spec, {"volumes": []}, "/data names the volume data, which does not exist"),
        (container, {"env": [SECRET]}, "AB_C .*secretKeyRef.*: export AB_C in this shell"),
        (container, {"resources": {"limits": {"nvidia.com/gpu": 99}}}, "need 198 GPUs"),
        (worker, {"replicas": 151}, "use at most 150 --replicas"),
    ],
)
def test_a_job_that_cannot_run_is_refused(tmp_path, where, change, message):
    """The message names the field; nothing is started or written."""
    built = job()
    where(built).update(change)
    with pytest.raises(ConfigError, match=message):
        run.run([built], local_dir=tmp_path / "local")
    assert not (tmp_path / "local").exists()


def test_a_wrong_claim_or_folder_is_refused(tmp_path):
    """A misspelt claim of --volume, and an unwritable folder of --volume or --local-dir: no pod
    starts, and no job remains."""
    with pytest.raises(ConfigError, match="no such claim: did you mean 'data'"):
        run.run([job()], local_dir=tmp_path, volumes={"dta": tmp_path})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot run in .*choose another --local-dir"):
        run.run([job()], local_dir=tmp_path / "file")
    with pytest.raises(ConfigError, match="File exists: .*file.*another --local-dir or --volume"):
        run.run([job()], local_dir=tmp_path, volumes={"runs": tmp_path / "file"})
    assert not (tmp_path / "jobs/job/manifest.yaml").exists()


def test_other_systems_are_refused(monkeypatch):
    """On a Mac the message names the missing features, and the alternatives."""
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConfigError, match=r"needs Linux.*loopback.*gptddp train"):
        run.run([job()])
