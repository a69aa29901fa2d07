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
GO = """
case $1 in
env) echo "go$GO_VERSION" ;;
install)
  name=${5%@*} version=${5##*@}
  mkdir -p "$GOBIN" "$GOMODCACHE/${name%/cmd/*}@$version/manifests"
  touch "$GOBIN/${name##*/}"
  ;;
build) # ... -o OUTPUT PACKAGE
  while [ "$1" != -o ]; do shift; done
  case $2 in */) touch "$2${3##*/}" ;; *) touch "$2" ;; esac
  ;;
esac
"""


@pytest.fixture
def machine(tmp_path):
    """Runs bash where `programs` and the least tools are all that is installed."""
    (tmp_path / "bin").mkdir()
    for name in TOOLS.split():
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))

    def start(*command: str, programs: dict[str, str] | None = None, **env: str):
        for name, text in (programs or {}).items():
            path = tmp_path / "bin" / name
            path.write_text(f"#!/bin/bash\n{text}\n")
            path.chmod(0o755)
        env = {"PATH": str(tmp_path / "bin"), "GPTDDP_CACHE": str(tmp_path / "cache"), **env}
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(
                ["/bin/bash", *command], env=env, text=True, stdin=pipe, stdout=pipe, stderr=pipe
            )
        )
        return started[-1]

    started: list[subprocess.Popen[str]] = []
    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("programs", "words"),
    [
        ({}, ["docker, the client, is not installed", "docker-cli"]),
        ({"docker": "exit 1"}, ["dockerd is not installed", "apt-get install docker.io"]),
    ],
)
def test_the_engine_says_which_program_is_missing(machine, programs, words):
    """And the Debian package that has it."""
    process = machine(str(SCRIPTS / "engine"), "up", programs=programs)
    error = process.communicate()[1]
    assert process.returncode == 1 and all(word in error for word in words)


def test_an_engine_elsewhere_needs_no_dockerd(machine):
    """The client alone is enough where an engine answers."""
    process = machine(str(SCRIPTS / "engine"), "up", programs={"docker": "exit 0"})
    assert process.communicate() == ("", "") and process.returncode == 0


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


def test_the_build_says_how_far_it_is(machine, tmp_path):
    """Which program of how many, and about how long it and the rest take."""
    binaries = str(SCRIPTS / "modules/binaries")
    process = machine(binaries, programs={"go": GO}, GO_VERSION="1.26.1")
    folder, told = process.communicate()
    assert process.returncode == 0, told
    lines = [line.partition("] ")[2] for line in told.splitlines()[1:]]
    assert lines[0] == "[1/12] kube-apiserver, about 5 minutes; about 11 minutes in all are left"
    assert lines[11].startswith("[12/12] training-operator, about 2 minutes; about 2 minutes in")
    assert len(list(Path(folder.strip(), "bin").iterdir())) == 12
    assert not list((tmp_path / "cache").glob("*.part"))


def test_an_old_go_is_refused(machine):
    """With the version that is needed."""
    process = machine(str(SCRIPTS / "modules/binaries"), programs={"go": GO}, GO_VERSION="1.25.7")
    error = process.communicate()[1]
    assert process.returncode == 1
    assert "go1.25.7 is too old: https://go.dev/dl, version 1.26 or newer" in error


def test_all_name_one_version_of_the_operator():
    """What is built for the tests, what users apply, and what they are told to apply."""
    built = re.search(r"OPERATOR=(\S+)", (SCRIPTS / "lib.sh").read_text())
    assert built
    for name in ("operator/kustomization.yaml", "operator/README.md", "gptddp/k8s/cluster.py"):
        assert set(re.findall(r"v1\.\d+\.\d+", (ROOT / name).read_text())) == {built[1]}, name
