"""The image under the conditions of a pod in a restricted namespace, run by Docker alone."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TAG = "gptddp:" + re.findall(r'__version__ = "(.*)"', (ROOT / "gptddp/__init__.py").read_text())[0]
UID = 1000  # the image's user, which must be able to write into the volumes


def docker(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=250)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run the image: no network, read-only root, no capability; returns the finished process."""
    volumes = tmp_path_factory.mktemp("volumes")
    for name in ("source", "data", "runs"):
        (volumes / name).mkdir()
        os.chown(volumes / name, UID, UID)
    text = (Path(os.__file__).parent / "argparse.py").read_text("utf-8")
    (volumes / "source" / "text.jsonl").write_text(
        "".join(json.dumps({"text": part}) + "\n" for part in text.split("\n\n"))
    )

    def run(*command: str, entrypoint: str = "") -> subprocess.CompletedProcess[str]:
        other = ["--entrypoint", entrypoint] if entrypoint else []
        mounts = [f"--volume={volumes / name}:/{name}" for name in ("data", "runs")]
        return docker(
            "run",
            "--rm",
            "--network=none",
            "--read-only",
            "--tmpfs=/tmp",
            "--cap-drop=ALL",
            "--security-opt=no-new-privileges",
            f"--volume={volumes}/source:/source:ro",
            *mounts,
            *other,
            TAG,
            *command,
        )

    run.volumes = volumes
    return run


@pytest.fixture(scope="module")
def trained(run):
    """A run directory with two steps, made by the commands of the image."""
    prepared = run("prepare", "/source", "--tokenizer=bytes", "--out=/data", entrypoint="gptddp")
    assert prepared.returncode == 0, prepared.stderr
    done = run("--data=/data", "--run-dir=/runs/smoke", "--steps=2", "--seq-len=64", "--batch=48")
    assert done.returncode == 0, done.stderr
    return run.volumes / "runs" / "smoke"


def test_a_training_step_runs_with_no_network_as_non_root_on_a_read_only_root(run, trained):
    """The entrypoint trains two steps and commits a checkpoint that belongs to the image's user."""
    assert json.loads((trained / "finished.json").read_text())["step"] == 2
    (checkpoint,) = (trained / "checkpoints").glob("step-*")
    assert checkpoint.stat().st_uid == UID


def test_sample_and_checkpoints_work_in_the_image(run, trained):
    """The other commands are on the path."""
    sampled = run("sample", "/runs/smoke", "--tokens=8", entrypoint="gptddp")
    assert sampled.returncode == 0, sampled.stderr
    listed = run("checkpoints", "/runs/smoke", entrypoint="gptddp")
    assert "step-000000000002" in listed.stdout


def test_a_stopped_container_leaves_with_143_and_a_checkpoint(run, trained):
    """Like the kubelet, `docker stop` sends SIGTERM to the init process, and then waits."""
    mounts = [f"--volume={run.volumes / n}:/{n}" for n in ("data", "runs")]
    started = docker(
        "run",
        "--detach",
        "--network=none",
        "--read-only",
        "--tmpfs=/tmp",
        *mounts,
        TAG,
        "--data=/data",
        "--run-dir=/runs/stopped",
        "--steps=100000",
        "--seq-len=64",
    )
    name = started.stdout.strip()
    try:
        log = subprocess.Popen(
            ["docker", "logs", "--follow", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with log:
            assert any(re.search(r"step \d+/100,?000", line) for line in log.stdout)
            assert docker("stop", "--time=60", name).returncode == 0
        code = docker("inspect", "--format={{.State.ExitCode}}", name).stdout.strip()
        assert code == "143"
        assert list((run.volumes / "runs/stopped/checkpoints").glob("step-*"))
    finally:
        docker("rm", "--force", name)


def test_the_image_has_labels_and_a_user_without_rights():
    """Labels, a numeric user, SIGTERM as the stop signal, and our entrypoint under an init."""
    (image,) = json.loads(docker("image", "inspect", TAG).stdout)
    config = image["Config"]
    assert config["User"] == "1000:1000"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Entrypoint"] == ["tini", "--", "python", "-m", "gptddp.launch"]
    assert config["Labels"]["org.opencontainers.image.version"] == TAG.partition(":")[2]


def test_every_module_of_the_image_is_byte_compiled(run):
    """On a read-only root a module without its .pyc would be compiled at every start."""
    code = (
        "import importlib.util, pathlib, torch\n"
        "for root in ('/opt/gptddp/gptddp', pathlib.Path(torch.__file__).parent / 'distributed'):\n"
        "    for p in pathlib.Path(root).rglob('*.py'):\n"
        "        c = pathlib.Path(importlib.util.cache_from_source(str(p)))\n"
        "        if not c.exists(): print(p)\n"
    )
    assert run("-c", code, entrypoint="python").stdout == ""
