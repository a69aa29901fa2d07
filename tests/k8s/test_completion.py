"""Shell completion: with what there is, in a moment, and without a word of anything else."""

import os
import shutil
import socket
import subprocess
import sys
import time

import pytest
import yaml
from click.testing import CliRunner
from support import api_objects as objects
from support.writable_api_server import WriteAPI, put_claims

from gptddp.k8s.cli import complete as complete_names
from gptddp.k8s.cli.main import cli

MAIN = "import sys; sys.argv[0] = 'gptddp-k8s'; from gptddp.k8s import main; main()"


@pytest.fixture
def api(tmp_path):
    server = WriteAPI(tmp_path)
    put_claims(server)
    server.put(objects.job("Created"), objects.job("Created", name="dune"))
    server.put({**objects.job("Created", name="else"), "metadata": {"name": "else"}})  # not ours
    queues = "/apis/kueue.x-k8s.io/v1beta2/namespaces/team/localqueues"
    server.paths[queues] = {"items": [{"metadata": {"name": "gpus"}}]}
    server.paths["/api/v1/namespaces"] = {"items": [{"metadata": {"name": "team"}}]}
    yield server
    server.close()


def complete(kubeconfig, *words, limit_s=25):
    """(completions of the last word, what else was said); a loaded machine needs its time."""
    patient = f"from gptddp.k8s.cli import complete; complete.LIMIT_S = {limit_s}; "
    env = os.environ | {"_GPTDDP_K8S_COMPLETE": "bash_complete", "KUBECONFIG": str(kubeconfig)}
    env |= {"COMP_WORDS": " ".join(["gptddp-k8s", *words]), "COMP_CWORD": str(len(words))}
    done = subprocess.run(
        [sys.executable, "-c", patient + MAIN], env=env, capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0
    return [line.split(",")[1] for line in done.stdout.splitlines() if line], done.stderr


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["st"], ["status"]),
        (["status", "d"], ["demo", "dune"]),
        (["delete", "de"], ["demo"]),
        (["list", "-n", "t"], ["team"]),
        (["submit", "-n", "team", "--queue", ""], ["gpus"]),
        (["submit", "--data", ""], ["data", "runs"]),
        (["prepare", "--source", ""], ["data", "runs"]),
        (["sample", "demo", "--runs", "r"], ["runs"]),
        (["list", "--context", ""], ["x"]),
        (
            ["submit", "--", "--warmu"],
            ["--warmup-steps"],
        ),
        (["submit", "x", "--dry"], ["--dry-run"]),
        (["status", "--local", "--local-dir", "/nowhere", "d"], []),
    ],
)
def test_it_completes_with_what_there_is(api, words, found):
    """Commands, options, and the names that the cluster has now; nothing on stderr."""
    assert complete(api.kubeconfig, *words) == (found, "")


def test_namespaces_that_may_not_be_seen_come_from_the_configuration(api):
    """Those of its contexts."""
    api.paths["/api/v1/namespaces"] = (403, "namespaces is forbidden")
    config = yaml.safe_load(api.kubeconfig.read_text())
    config["contexts"][0]["context"]["namespace"] = "mine"
    api.kubeconfig.write_text(yaml.safe_dump(config))
    assert complete(api.kubeconfig, "list", "-n", "") == (["mine"], "")


@pytest.mark.parametrize("broken", ["absent", "torn", "down", "silent", "noisy"])
def test_an_error_is_no_completion_and_no_word(api, tmp_path, broken):
    """No configuration, a broken one, a server that is away or never answers, a plug-in's words."""
    kubeconfig, listener = api.kubeconfig, socket.create_server(("127.0.0.1", 0))
    config = yaml.safe_load(kubeconfig.read_text())
    if broken == "absent":
        kubeconfig = tmp_path / "none"
    elif broken == "torn":
        kubeconfig.write_text("{")
    elif broken == "down":
        api.down = True
    elif broken == "silent":
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config["clusters"][0]["cluster"]["server"] = url
        kubeconfig.write_text(yaml.safe_dump(config))
    else:
        plugin = {"command": "sh", "args": ["-c", "echo give me a password >&2; read x; exit 1"]}
        plugin |= {"apiVersion": "client.authentication.k8s.io/v1", "interactiveMode": "Never"}
        config["users"][0]["user"] = {"exec": plugin}
        kubeconfig.write_text(yaml.safe_dump(config))
    began = time.monotonic()
    assert complete(kubeconfig, "status", "", limit_s=complete_names.LIMIT_S) == ([], "")
    assert time.monotonic() - began < 15  # of a loaded machine: the answer is waited for 2 s
    listener.close()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_one_of_the_shell(shell):
    """It names the program, and the shell can read it."""
    script = CliRunner().invoke(cli, ["completion", shell]).stdout
    assert "_GPTDDP_K8S_COMPLETE" in script and "gptddp-k8s" in script
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=script, text=True).returncode == 0
