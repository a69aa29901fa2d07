"""The scripts that build and remove the cluster, with programs that only pretend."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests/cluster"
# What the scripts call, and nothing else, is on PATH.
TOOLS = (
    "awk bash basename cat chmod cp cut dirname find flock ln mkdir mv rm sed sha256sum sort "
    "touch xargs"
)


@pytest.fixture
def machine(tmp_path, spawn):
    """Runs bash where `programs` and the least tools are all that is installed."""
    (tmp_path / "bin").mkdir()
    for name in TOOLS.split():
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))

    def start(*command: str, programs: dict[str, str] | None = None):
        for name, text in (programs or {}).items():
            path = tmp_path / "bin" / name
            path.write_text(f"#!/bin/bash\n{text}\n")
            path.chmod(0o755)
        env = {"PATH": str(tmp_path / "bin"), "GPTDDP_CACHE": str(tmp_path / "cache")}
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        return spawn(["/bin/bash", *command], env=env, text=True, **pipes)

    return start


@pytest.mark.parametrize(
    ("programs", "code", "words"),
    [
        ({}, 0, "there is no cluster gptddp"),
        ({"docker": "exit 1"}, 1, "no Docker engine answers"),
        ({"docker": ":"}, 0, "there is no cluster gptddp"),
        ({"docker": "[ $1 = ps ] && echo node-1 && echo node-2 || echo $* >&2"}, 0,
         "rm --force --volumes node-1 node-2"),
        ({"docker": "echo node-1", "kind": "echo kind $* >&2"}, 0,
         "kind delete cluster --name gptddp"),
    ],
)  # fmt: skip
def test_a_cluster_is_removed_without_kind_too(machine, tmp_path, programs, code, words):
    """Its nodes are looked for first; their folder goes, unless Docker does not answer."""
    (tmp_path / "cache/nodes").mkdir(parents=True)
    process = machine(str(SCRIPTS / "down"), programs=programs)
    assert words in process.communicate()[1] and process.returncode == code
    assert (tmp_path / "cache/nodes").exists() == bool(code)


def test_of_two_builds_one_waits_for_the_other(machine, tmp_path):
    """Neither removes what the other one builds; what is left over of an old one goes."""
    build = f"""
        . {SCRIPTS}/lib.sh
        make() {{ echo built >"$1/it"; read; }}
        lock_cache
        folder=$(artifact it "$(key "$1")" make)
        cat "$folder/it"
    """
    first = machine("-c", build, "first", "1")
    assert "building it" in first.stderr.readline()
    second = machine("-c", build, "second", "2")
    assert f"process {first.pid}, first" in second.stderr.readline()
    for process in (first, second):
        assert process.communicate("go on\n")[0] == "built\n" and process.returncode == 0
    assert len(list((tmp_path / "cache").glob("it-*"))) == 1


def test_all_name_one_version_of_the_operator():
    """What is built for the tests, what users apply, and what they are told to apply."""
    built = re.search(r"OPERATOR=(\S+)", (SCRIPTS / "lib.sh").read_text())
    assert built
    for name in ("operator/kustomization.yaml", "operator/README.md", "gptddp/k8s/cluster.py"):
        assert set(re.findall(r"v1\.\d+\.\d+", (ROOT / name).read_text())) == {built[1]}, name
