"""--sweep: one job per value, named by it, and otherwise like a job submitted by hand."""

import re

import pytest
import yaml
from click.testing import CliRunner
from support.paths import ROOT
from support.writable_api_server import submit

from gptddp.k8s.cli.main import cli

SWEEP = ["--sweep", "lr=1e-3,3e-3", "--sweep", "n-layer=2"]
NAMES = ["demo-n-layer-2-lr-1e-3", "demo-n-layer-2-lr-3e-3"]


def render(*args):
    result = CliRunner().invoke(cli, ["render", *args])
    assert result.exit_code == 0, result.stderr
    return list(yaml.safe_load_all(result.stdout))


def test_a_sweep_equals_jobs_written_by_hand():
    """The jobs have their companions, and memory for their own models."""
    by_hand = []
    for rate, layers in (("1e-3", "2"), ("1e-3", "400"), ("3e-3", "2"), ("3e-3", "400")):
        name = f"demo-n-layer-{layers}-lr-{rate}"
        own = ["--steps", "9", "--warmup-steps", "1", "--n-layer", layers, "--lr", rate]
        by_hand += render("--name", name, "--", *own)
    sweep = ["--sweep", "lr=1e-3,3e-3", "--sweep", "n_layer=2,400"]
    assert render("--name", "demo", *sweep, "--", "--steps", "9", "--warmup-steps", "1") == by_hand


def test_submitting_a_sweep_again_creates_only_missing_jobs(api, k8s):
    """Existing jobs are not written; a new value is a new job."""
    first = submit(k8s, *SWEEP)
    assert first.exit_code == 0, first.stderr
    assert first.stdout.split() == [
        *(f"pytorchjob.kubeflow.org/{NAMES[0]}", "created"),
        *(f"pytorchjob.kubeflow.org/{NAMES[1]}", "created"),
    ]
    del api.writes[:]
    again = submit(k8s, "--sweep", "lr=1e-3,3e-3,1e-2", "--sweep", "n-layer=2")
    assert again.exit_code == 0, again.stderr
    assert again.stdout.split()[1::2] == ["unchanged", "unchanged", "created"]
    assert api.writes.count("create PyTorchJob") == 1
    jobs = {name for plural, name in api.objects if plural == "pytorchjobs"}
    assert jobs == {*NAMES, "demo-n-layer-2-lr-1e-2"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--sweep", "lr=1e-3,x"], "--lr is 'x': it must be a number, as in 0.003"),
        (["--sweep", "lrr=1"], "unknown field 'lrr': did you mean 'lr'?"),
        (["--sweep", "data=a,b"], "--data cannot be swept: give it once for all runs, after --"),
        (["--sweep", "lr=1", "--", "--lr", "2"], "--lr is given before and after --"),
        (["--sweep", "n-layer=2", "--name", "a" * 60], "may have at most 63"),
        (["--sweep", "n-layer=2", "--sweep", "n_layer=3"], "n_layer is given twice"),
        (["--sweep", "lr"], "is not of the form FIELD=A,B..."),
    ],
)
def test_a_mistake_is_refused_before_the_first_job(api, k8s, given, told):
    """The exit code is 2, and nothing is written."""
    result = k8s("submit", *given)
    assert result.exit_code == 2 and told in result.stderr
    assert api.writes == []


def test_local_jobs_run_one_after_the_other_even_if_one_fails(tmp_path):
    """A failed job sets the exit code, and the next one runs."""
    data = tmp_path / "volumes/data"
    data.mkdir(parents=True)
    (data / "dataset.json").write_text("{}")
    own = tmp_path / "own/gptddp/launch"
    own.mkdir(parents=True)
    own.joinpath("launcher.py").write_text(
        "import sys\n"
        "def main(args=None):\n"
        "    print('of', rate := sys.argv[sys.argv.index('--lr') + 1])\n"
        "    return 3 if rate == '0.001' else 0\n"
    )
    where = ["--local", "--local-dir", str(tmp_path), "--code", str(tmp_path / "own")]
    result = CliRunner().invoke(cli, ["submit", *where, "--sweep", "lr=1e-3,3e-3"])
    assert result.exit_code == 100, result.output
    logs = {it.parents[1].name: it.read_text() for it in tmp_path.glob("jobs/*/logs/*.log")}
    assert {name: re.findall("of (.*)", log) for name, log in logs.items()} == {
        "gptddp-lr-1e-3": ["0.001"],
        "gptddp-lr-3e-3": ["0.003"],
    }


def test_the_experiment_for_katib_has_the_job_that_its_command_renders():
    """Only the parts named in its comment differ; a trial's parameters are filled in."""
    text = (ROOT / "examples/katib.yaml").read_text()
    head, _, made = text.partition("    trialSpec:\n")
    options = re.search(r"`gptddp-k8s render (.*?)`", re.sub(r"\n# ?", " ", head))
    (job,) = render(*options[1].split())
    places = {"trial": "trial", "lr": "0.5"}
    made = re.sub(r"\$\{trialParameters\.(\w+)\}", lambda match: places[match[1]], made)
    made = yaml.safe_load(made.replace("- 0.5", "- '0.5'"))  # Katib's values are texts
    pod = made["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    assert pod["securityContext"].pop("runAsUser") == 1000
    command = pod["containers"][0].pop("command")
    assert made == job
    entry = re.search(r"^ENTRYPOINT (.*)$", (ROOT / "Dockerfile").read_text(), re.M)
    assert command == yaml.safe_load(entry[1])
    experiment = yaml.safe_load(text)["spec"]
    assert {it["name"] for it in experiment["trialTemplate"]["trialParameters"]} == {*places}
    (pattern,) = experiment["metricsCollectorSpec"]["source"]["filter"]["metricsFormat"]
    assert re.findall(pattern, "val_bpb:          4.029561") == [("val_bpb", "4.029561")]
