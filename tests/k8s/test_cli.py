"""The `gptddp-k8s` command as its users meet it: output, messages, exit codes, imports."""

import importlib
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


def test_render_prints_objects_on_stdout(k8s):
    """YAML and JSON say the same, twice the same bytes; stderr says how to make the Secret."""
    args = ("render", "--replicas", "4", "--name", "demo", "--", "--steps", "90")
    text, again, as_json = k8s(*args), k8s(*args), k8s("render", "-o", "json", *args[1:])
    assert text.exit_code == as_json.exit_code == 0
    assert text.stdout == again.stdout
    made = "kubectl create secret generic demo --from-file=rendezvous-key=/dev/stdin"
    assert f"openssl rand -hex 32 | {made}" in text.stderr  # no key in the list of processes
    objects = rendered(text)
    assert json.loads(as_json.stdout) == {"apiVersion": "v1", "kind": "List", "items": objects}
    kinds = ["ServiceAccount", "NetworkPolicy", "PodDisruptionBudget", "PyTorchJob"]
    assert [(o["kind"], o["metadata"]["name"]) for o in objects] == [(k, "demo") for k in kinds]


def test_notes_go_to_stderr(k8s):
    """A warning does not spoil the stream that kubectl reads."""
    result = k8s("render", "--image", "mine")
    assert result.exit_code == 0 and "warning: --image mine" in result.stderr
    assert rendered(result)[-1]["kind"] == "PyTorchJob"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--replcas", "4"], "Did you mean '--replicas'?"),
        (["--replicas", "four"], "'four' is not a valid integer"),
        (["--", "--stpes", "4"], "unknown option '--stpes': did you mean '--steps'?"),
        (["--steps", "4"], "an option of the trainer: put it after --"),
        (["--", "--batch", "50"], "world-size"),
        (["--", "--batch", "50", "--lanes", "48"], "batch 50 is not divisible by lanes 48"),
        (["--replicas", "64"], "use --replicas 12 or less"),
        (["--replicas", "4", "--min", "5"], "[pods]"),
        (["--replicas", "0"], "--replicas 1 or more"),
        (["--name", "Demo"], "[format]"),
        (["--env", "A"], "NAME=VALUE"),
        (["--env", "=x"], "NAME=VALUE"),
        (["--env", "API_KEY=x"], "[environment]"),
        (["-f", "none.toml"], "cannot read the job file none.toml"),
    ],
)
def test_a_mistake_has_one_message_and_exit_code_2(k8s, args, message):
    """No traceback, nothing on stdout, the fix on stderr."""
    if message == "world-size":
        args, message = ["--replicas", "30", *args], "30 workers but only 10 lanes"
    result = k8s("render", *args)
    assert result.exit_code == 2
    assert message in result.stderr and result.stdout == ""
    assert "Traceback" not in result.stderr


def test_every_broken_rule_is_reported_at_once(k8s):
    """A line for each, so that nobody has to try again and again."""
    result = k8s("render", "--env", "RANK=1", "--min", "0", "--grace-s", "1")
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == ["error"] * 3


def test_a_secret_does_not_reach_the_message(k8s):
    """The refusal of a secret names the variable, and not its value."""
    result = k8s("render", "--env", "HF_TOKEN=hunter2")
    assert "HF_TOKEN" in result.stderr and "hunter2" not in result.output


def test_submit_without_a_cluster_says_what_to_do(k8s, tmp_path):
    """Exit code 1, the options that name one, and the way that needs none."""
    result = k8s("submit", "--kubeconfig", str(tmp_path / "none"))
    assert result.exit_code == 1
    assert "--kubeconfig" in result.stderr and "--local" in result.stderr


def test_submit_local_runs_what_render_prints(k8s, monkeypatch, tmp_path):
    """The very same objects; options of the local run; its exit code."""
    calls = []
    monkeypatch.setattr(run, "run", lambda objects, **how: calls.append((objects, how)) or 100)
    args = ["--replicas", "3", "--", "--steps", "9"]
    result = k8s("submit", "--local", "-v", "--local-dir", "d", "--volume", "data=/x", *args)
    assert result.exit_code == 100
    ((objects, how),) = calls
    assert objects == rendered(k8s("render", *args))
    assert how == {"local_dir": Path("d"), "volumes": {"data": Path("/x")}, "verbose": True}


def test_submit_local_says_what_a_process_takes_no_notice_of(k8s, monkeypatch):
    """One line with the options that only a cluster has a meaning for; none without them."""
    monkeypatch.setattr(run, "run", lambda objects, **how: 0)
    asked = ["--toleration", "spot", "--priority-class", "low"]
    result = k8s("submit", "--local", *asked, "--env-from-secret", "proxy")
    assert "warning: with --local --toleration, --priority-class have no meaning\n" in result.stderr
    assert "what this shell exports" in result.stderr
    assert k8s("submit", "--local", "--env", "A=1").stderr == ""


def test_submit_local_without_a_dataset_says_how_to_make_one(k8s, monkeypatch, tmp_path):
    """Exit code 2, the command to type, and no folder left behind."""
    monkeypatch.chdir(tmp_path)
    result = k8s("submit", "--local", "--replicas", "4")
    assert result.exit_code == 2
    assert "gptddp prepare SOURCE... --out gptddp-local/volumes/data`" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_one_name_with_two_values_is_refused(k8s):
    """The first would be lost without a word; the same pair twice is no matter."""
    result = k8s("render", "--env", "A=/x", "--env", "A=/y")
    assert result.exit_code == 2 and "A is given as '/x' and as '/y'" in result.stderr
    assert k8s("render", "--env", "A=1", "--env", "A=1").exit_code == 0


def test_the_help_has_the_options_of_pods_apart(k8s):
    """They are many, and a job on a cluster of one's own needs none of them."""
    first, _, pods = k8s("submit", "--help").stdout.partition("What a cluster asks of its pods:")
    assert "--replicas" in first and "--wait" in first and "--toleration" not in first
    assert "--toleration" in pods and "--replicas" not in pods


def test_help_and_version(k8s):
    """Every command and every option has a help text."""
    assert k8s("--version").stdout == f"gptddp-k8s {__version__}\n"
    for name in cli.list_commands(None):
        command = cli.get_command(None, name)
        assert k8s(name, "--help").exit_code == 0 and f"  {name} " in k8s("--help").stdout
        assert command.help
        assert all(p.help for p in command.params if p.param_type_name == "option")


FORBIDDEN = (
    *("torch", "numpy", "pyarrow", "prometheus_client", "kubernetes", "requests", "httpx"),
    *("pydantic", "jinja2", "rich", "importlib.metadata", "tokenizers"),
)
PROBE = """
import sys
sys.argv = ["gptddp-k8s", *sys.argv[1:]]
from gptddp.k8s.cli.main import cli
try:
    cli()
except SystemExit as end:
    code = end.code
import gptddp.k8s.render.rules, gptddp.k8s.local.run, gptddp.k8s.local.pod_main
print("\\n".join(sys.modules), file=sys.stderr)
sys.exit(code)
"""


def python(code, *args):
    """Run code in a fresh interpreter."""
    command = [sys.executable, "-c", code, *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=env)


@pytest.mark.parametrize("args", [["--help"], ["render", "--replicas", "4"]])
def test_nothing_heavy_is_imported(args):
    """The control plane, --local included, loads neither torch nor a Kubernetes client."""
    result = python(PROBE, *args)
    assert result.returncode == 0
    assert not {m for m in result.stderr.splitlines() if m in FORBIDDEN}


def test_help_does_without_yaml():
    """What `--help` and completion do not need, they do not load."""
    probe = PROBE.replace("import gptddp.k8s.render.rules", "#")
    result = python(probe, "--help")
    assert result.returncode == 0
    assert "click" in result.stderr.split() and "yaml" not in result.stderr.split()


def test_without_its_packages_the_command_prints_the_install_line():
    """A bare wheel has no click: one line, no traceback."""
    code = "import sys; sys.modules['click'] = None; from gptddp.k8s import main; main()"
    result = python(code)
    assert result.returncode == 1
    assert result.stderr.strip().endswith("pip install 'gptddp[k8s]'")
    assert "Traceback" not in result.stderr


def test_every_command_of_a_module_can_be_called():
    """What stands in COMMANDS of a module of k8s/cli is in the group, with that and its summary."""
    listed = {}
    for module in {module for module, _ in cli.known.values()}:
        for command in importlib.import_module(f"gptddp.k8s.cli.{module}").COMMANDS:
            listed[command.name] = module, command.help.partition("\n")[0]
    assert listed == dict(cli.known)
