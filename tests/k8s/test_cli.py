"""The `gptddp-k8s` command: its output, messages, exit codes and start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from support.paths import ROOT

from gptddp import __version__
from gptddp.k8s.cli.main import cli
from gptddp.k8s.local import run


@pytest.fixture
def k8s():
    """Run `gptddp-k8s` with arguments."""
    return lambda *args: CliRunner().invoke(cli, args, prog_name="gptddp-k8s")


def rendered(result):
    """The objects of a YAML stream; the last one is the job."""
    return list(yaml.safe_load_all(result.stdout))


def test_render_prints_objects_on_stdout_and_notes_on_stderr(k8s):
    """YAML and JSON have the same objects; a note has the command that creates the Secret."""
    args = ("render", "--image", "mine", "--name", "demo", "--env", "A=1", "--env", "A=1")
    text, again, as_json = k8s(*args), k8s(*args), k8s("render", "-o", "json", *args[1:])
    assert text.exit_code == as_json.exit_code == 0
    assert text.stdout == again.stdout and "warning: --image mine" in text.stderr
    made = "kubectl create secret generic demo --from-file=rendezvous-key=/dev/stdin"
    assert f"openssl rand -hex 32 | {made}" in text.stderr  # no key in the list of processes
    objects = rendered(text)
    assert json.loads(as_json.stdout) == {"apiVersion": "v1", "kind": "List", "items": objects}
    assert {it["metadata"]["name"] for it in objects} == {"demo"}
    assert objects[-1]["kind"] == "PyTorchJob"


def test_every_mistake_is_reported_at_once_and_no_secret_is_shown(k8s):
    """Each broken rule and each malformed option gives one line, so that one try shows all
    mistakes."""
    result = k8s("render", "--env", "RANK=1", "--env", "HF_TOKEN=hunter2", "--grace-s", "1")
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["error"] * 3
    assert "HF_TOKEN" in result.stderr and "hunter2" not in result.output
    result = k8s("render", "--cpu", "x", "--toleration", "a:b", "--toleration", "c:d")
    assert result.stderr.count("[format]") == 3


def test_submit_local_runs_the_rendered_objects(k8s, monkeypatch, tmp_path):
    """The local run gets the rendered objects and its options; its exit code is returned."""
    calls = []
    monkeypatch.setattr(run, "run", lambda objects, **how: calls.append((objects, how)) or 100)
    args = ["--replicas", "3", "--", "--steps", "9"]
    result = k8s("submit", "--local", "-v", "--local-dir", "d", "--volume", "data=/x", *args)
    assert result.exit_code == 100
    ((objects, how),) = calls
    assert objects == rendered(k8s("render", *args))
    assert how == {"local_dir": Path("d"), "volumes": {"data": Path("/x")}, "verbose": True}


def test_submit_local_warns_of_options_without_effect(k8s, monkeypatch):
    """One warning names the options that only a cluster uses; without them there is none."""
    monkeypatch.setattr(run, "run", lambda objects, **how: 0)
    asked = ["--toleration", "spot", "--node-selector", "a=b"]
    result = k8s("submit", "--local", *asked)
    assert "warning: with --local --node-selector, --toleration have no meaning" in result.stderr
    assert k8s("submit", "--local", "--cpu", "1").stderr == ""


def test_help_describes_every_option_and_groups_the_pod_options(k8s):
    """Each option of a command has a help text; options for pods have their own group."""
    assert k8s("--version").stdout == f"gptddp-k8s {__version__}\n"
    for name, command in cli.commands.items():
        assert k8s(name, "--help").exit_code == 0
        assert all(p.help for p in command.params if p.param_type_name == "option"), name
    pods = k8s("submit", "--help-all").stdout.partition("Cluster requirements:")[2]
    pods, _, others = pods.partition("On a cluster:")
    assert "--toleration" in pods and "--replicas" not in pods and "--wait" in others


# -- the start -----------------------------------------------------------------------------------

MAIN = "import sys; sys.argv[0] = 'gptddp-k8s'; from gptddp.k8s import main; main()"


def python(code, *args, **env):
    """Run code in a fresh interpreter."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, env=env, timeout=60
    )


def test_without_its_packages_the_command_prints_the_install_line():
    """An installation without click prints one line, not a traceback."""
    result = python("import sys; sys.modules['click'] = None; from gptddp.k8s import main; main()")
    assert result.returncode == 1
    assert result.stderr.strip().endswith("pip install 'gptddp[k8s]'")
    assert "Traceback" not in result.stderr


def test_a_shell_completes_the_trainers_options_too():
    """Completion works as docs/k8s.md describes it."""
    typed = {"COMP_WORDS": "gptddp-k8s submit -- --warmu", "COMP_CWORD": "3"}
    result = python(MAIN, _GPTDDP_K8S_COMPLETE="bash_complete", **typed)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "plain,--warmup-steps\n"
    script = python(MAIN, _GPTDDP_K8S_COMPLETE="bash_source").stdout
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert "_GPTDDP_K8S_COMPLETE=bash_complete" in script
