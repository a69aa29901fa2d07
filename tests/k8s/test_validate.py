"""`validate`: manifests of strangers and of ours, from files, folders and stdin."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner
from support.manifests import SPECS, render, render_job
from support.paths import ROOT

from gptddp.k8s.cli.main import cli
from gptddp.k8s.render import documents
from gptddp.k8s.render.manifest import to_yaml

STRANGER = """\
# nobody's example in particular
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata:
  name: mnist
spec:
  cleanPodPolicy: None
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      template:
        spec:
          containers:
            - name: torch
              image: mnist
              command: python train.py
    Worker:
      replica: 3
      template:
        spec:
          containers:
            - name: pytorch
              image: mnist
              env:
                - {name: DEBUG, value: yes}
"""
GOOD = """\
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {generateName: mnist-, labels: {kueue.x-k8s.io/queue-name: team}}
spec:
  pytorchReplicaSpecs:
    Master: &replica
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - name: pytorch
              image: mnist
              resources: {limits: {nvidia.com/gpu: 1, cpu: 500m}}
    Worker:
      <<: *replica
      replicas: 3
"""


def validate(*args, stdin=""):
    return CliRunner().invoke(cli, ["validate", *map(str, args)], input=stdin)


def test_a_strangers_job_gets_line_field_rule_and_fix():
    """Every mistake of it at once, in the order of the lines, each with where it stands."""
    done = validate("-f", "-", stdin=STRANGER)
    assert done.exit_code == 2
    lines = [line.split(": ", 2) for line in done.stdout.splitlines()]
    where = "spec.pytorchReplicaSpecs"
    assert [line[:2] for line in lines] == [
        ["stdin:7", "spec.cleanPodPolicy"],
        ["stdin:13", f"{where}.Master.template.spec.containers"],
        ["stdin:16", f"{where}.Master.template.spec.containers[0].command"],
        ["stdin:18", f"{where}.Worker.replica"],
        ["stdin:25", f"{where}.Worker.template.spec.containers[0].env[0].value"],
    ]
    assert "it belongs to spec.runPolicy.cleanPodPolicy [unknown-field]" in lines[0][2]
    assert done.stderr == "5 problems in it\n"


def test_what_is_malformed_hides_no_other_mistake():
    """The rules judge what they can read of a job whose structure is wrong elsewhere."""
    text = STRANGER.replace("value: yes", "valu: yes").replace("  cleanPodPolicy: None\n", "")
    text = text.replace("    Master:", "    master:").replace("replica: 3", "replicas: 0")
    found = validate("-f", "-", stdin=text).stdout
    assert "env[0].valu: unknown field; did you mean 'value'?" in found
    assert "pytorchReplicaSpecs.master: unknown; use Master or Worker" in found
    assert "Worker.replicas: 0 is less than 1" in found and "shape" not in found


def test_a_good_job_of_a_stranger_is_valid():
    """Master and workers, a name that the server makes, and anchors of YAML."""
    done = validate("-f", "-", stdin=GOOD)
    assert (done.exit_code, done.stdout, done.stderr) == (
        0,
        "stdin:1: PyTorchJob/mnist- is valid\n",
        "",
    )


@pytest.mark.parametrize("name", SPECS)
def test_what_render_prints_is_valid(name):
    """The PyTorchJob is checked, what is beside it is named as left out."""
    done = validate("-f", "-", stdin=to_yaml(render(*SPECS[name])))
    assert done.exit_code == 0 and done.stdout.count("is valid") == 1
    assert "NetworkPolicy, PodDisruptionBudget, ServiceAccount" in done.stderr


def test_every_document_of_a_text_is_judged():
    """The second of two, an item of a List, and JSON."""
    bad = render_job()
    bad["spec"]["elasticPolicy"]["minReplicas"] = 9
    many = json.dumps({"apiVersion": "v1", "kind": "List", "items": [render_job(), bad]})
    for text in (f"{GOOD}\n---\n---\n{to_yaml([bad])}", many):
        done = validate("-f", "-", stdin=text)
        assert done.exit_code == 2
        assert "9 is above maxReplicas" in done.stdout and done.stdout.count("is valid") == 1
        assert done.stderr == "1 problem in 1 of 2 objects\n"


def test_a_folder_is_read_and_with_r_those_in_it(tmp_path):
    """Its YAML and JSON files by name, and no others; several -f in their order."""
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.yml").write_text(GOOD)
    (tmp_path / "a.json").write_text(json.dumps(render_job()))
    (tmp_path / "c.txt").write_text("not: read")
    (tmp_path / "deep/d.yaml").write_text(STRANGER)
    done = validate("-f", tmp_path)
    assert done.exit_code == 0
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [
        str(tmp_path / name) for name in ("a.json", "b.yml")
    ]
    assert validate("-f", tmp_path, "-R").exit_code == 2
    assert validate("-f", tmp_path / "b.yml", "-f", tmp_path / "deep").exit_code == 2


def test_a_job_file_is_checked_as_render_would(tmp_path):
    """The options of a job.toml, and the job that they make."""
    file = tmp_path / "job.toml"
    file.write_text("[job]\nreplicas = 4\n")
    assert validate("-f", file).stdout == f"{file}:1: job/gptddp is valid\n"
    file.write_text("[job]\nreplicas = 4\ngrace_s = 1\n")
    done = validate("-f", file)
    assert done.exit_code == 2 and "--grace-s: 1 s is not enough" in done.stdout


def test_json_has_every_object_and_its_problems():
    """For a program: where, what, valid or null for what is left out, and rule and fix."""
    text = f"{STRANGER}---\nkind: ConfigMap\napiVersion: v1\nmetadata: {{name: c}}\n"
    done = validate("-f", "-", "-o", "json", stdin=text)
    job, other = json.loads(done.stdout)
    assert (job["file"], job["line"], job["name"], job["valid"]) == ("stdin", 2, "mnist", False)
    assert set(job["problems"][0]) == {"id", "line", "field", "rule", "fix"}
    assert (other["kind"], other["valid"], other["problems"]) == ("ConfigMap", None, [])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a:\n\tb: 1\n", "stdin:2: document: found character that cannot start any token; indent"),
        ("a: {{ .Values.x }}\n  b\n", "it looks like a template: render it first"),
        ("a: &a [*a]", "its aliases repeat too much"),
        ("a: " + "[" * 100_000, "document: it is nested too deep"),
        ("- " * 100_000, "document: it is nested too deep"),
        ('{"a":' * 100_000, "document: it is nested too deep"),
        ("a: 1\nb: .inf", "stdin:2: document: .inf, which JSON does not have"),
        ("- a", "is no object with apiVersion and kind"),
        ("spec: {}", "kind: is missing; write kind: PyTorchJob, or what it is"),
        ("kind: PyTorchJob", "apiVersion: is missing; write apiVersion: kubeflow.org/v1"),
        ("kind: PyTorchJob\napiVersion: kubeflow.org/v1beta2", "write kubeflow.org/v1 "),
        ("kind: PytorchJob\napiVersion: kubeflow.org/v1", "kind: 'PytorchJob' is unknown; write P"),
        ("kind: PyTorchJob\napiVersion: kubeflow.org/v1", "metadata: is missing"),
        (GOOD.replace("generateName", "namespace"), "metadata.name: is missing"),
        (GOOD.replace("replicas: 3", "replicas: 3\n      replicas: 4"), "17 and again in line 18"),
        (GOOD.replace("image: mnist", "image: mnist\n              image: other"),
         "containers[0].image: stands in line 13 and again in line 14"),
        (GOOD + "spec: {}\n", "stdin:18: spec: stands in line 4 and again in line 18"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
        ("a: !!int x", "could not convert"),
        ("a: 1\n...\nb: 2", "kubectl would leave out the rest without a word"),
        ("  a: 1\nb: 2", "kubectl would leave out the rest without a word"),
        ("a: {~: 1}", "a key is null"),
        ("apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nspec: 3", "stdin:3: spec: 3"),
        ("kind: \x1b[31m\napiVersion: v1", "control characters"),
    ],
)  # fmt: skip
def test_a_text_that_is_no_job_is_refused_with_its_line(text, words):
    """No traceback for whatever stands in a file."""
    done = validate("-f", "-", stdin=text)
    assert (done.exit_code, type(done.exception)) == (2, SystemExit)
    assert words in done.stdout and done.stdout.startswith("stdin:")


def test_nothing_to_check_is_an_error(tmp_path):
    """No file, no manifest in a folder, no PyTorchJob, no UTF-8: exit code 2 and what to do."""
    (tmp_path / "deep").mkdir()
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"a: \xe4")
    for args, words in (
        (["-f", tmp_path / "absent.yaml"], "cannot be read: No such file"),
        (["-f", tmp_path / "deep"], "has no file that ends in .yaml, .yml, .json"),
        (["-f", latin], "byte 3 is not UTF-8: save the file as UTF-8"),
        (["-f", "-"], "-f -: no PyTorchJob in it that stands by itself"),
    ):
        done = validate(*args)
        assert done.exit_code == 2 and words in done.stderr and done.stderr.startswith("error: ")


def test_words_of_a_strangers_file_cannot_move_the_cursor():
    """Control characters that YAML lets through as escapes are shown as escapes."""
    done = validate("-f", "-", stdin='kind: "\\e[31m"\napiVersion: v1\n')
    assert "\x1b" not in done.stdout + done.stderr and "\\x1b[31m" in done.stderr
    done = validate("-f", "-", stdin=GOOD.replace("mnist-", '"\\e[2J"'))
    assert "\x1b" not in done.stdout + done.stderr


def test_a_date_or_an_octal_number_is_no_text():
    """What PyYAML would read otherwise than kubectl."""
    (read,) = documents.parse("{a: 2026-01-01, b: 12:30, c: 1e3, d: 010, e: y}", "x")
    assert read.value == {"a": "2026-01-01", "b": "12:30", "c": 1000.0, "d": 8, "e": True}
    (read,) = documents.parse("[0X1F, 0O7, 1e1_0, 1_.5, -_6, 0x_f]", "x")
    assert read.value == [31, 7, 1e10, 1.5, -6, 15]
    for text in ("0x", "0b_", "1.e538", "9" * 6000, "0x1" + "0" * 16, "1" + "_" * 9999):
        (read,) = documents.parse(f"{{a: {text}}}", "x")
        assert read.value == {"a": text}


def test_a_placeholder_is_named_with_what_fills_it_in():
    """Half of all manifests that are published have some: the fix is not a value of ours."""
    text = GOOD.replace("replicas: 3", "replicas: $NODES").replace(
        "image: mnist", "image: '${REPO}/<project>:{{ tag }}'"
    )
    said = validate("-f", "-", stdin=text).stdout
    assert 'replicas: "$NODES", a string, stands where a whole number must be; fill in' in said
    assert "fill in $NODES first, as with `envsubst` [type]" in said
    assert "is not an image; fill in ${REPO} first, as with `envsubst` [pod-choices]" in said


def test_a_key_with_dots_has_its_own_line_and_one_spelling():
    """A device's name is a key, for the types and for the rules."""
    for amount, id in (('"two"', "type"), ("0.5", "type"), ('"0.5"', "pod-resources")):
        text = GOOD.replace("cpu: 500m", f"\n  a.b/c: {amount}")
        (line,) = [n for n, it in enumerate(text.splitlines(), 1) if "a.b/c" in it]
        found = validate("-f", "-", stdin=text).stdout.splitlines()
        assert any(
            it.startswith(f"stdin:{line}: ") and ".limits[a.b/c]: " in it and it.endswith(f"[{id}]")
            for it in found
        )
    text = GOOD.replace("cpu: 500m}", "a.b/c: }, requests: {a.b/c: 8}")
    said = validate("-f", "-", stdin=text).stdout
    assert "requests[a.b/c]: 8, but there is no limit; set the limit to 8" in said


def test_json_is_read_as_kubectl_reads_it():
    """Objects that follow one another, halves of a character, escaped slashes, and YAML after."""
    text = '{"a": "\\ud83d\\ude00 \\\\ud83d\\\\ude00 b\\/c"}\n{\n\t"d": 1\n}\n---\ne: 2\n'
    one, two, three = documents.parse(text, "x")
    assert one.value == {"a": "\U0001f600 \\ud83d\\ude00 b/c"}
    assert (two.value, two.line("d")) == ({"d": 1}, 3)
    assert (three.value, three.line("e")) == ({"e": 2}, 6)


def test_it_asks_no_cluster():
    """A fresh interpreter has loaded neither kubernetes nor what starts slowly."""
    code = f"""
import sys
from gptddp.k8s.cli.main import cli
try:
    cli(["validate", "-f", {str(ROOT / "k8s/jobs")!r}])
finally:
    print(*sys.modules, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0
    loaded = set(done.stderr.splitlines()[-1].split())
    assert not loaded & {"kubernetes", "tomllib", "ssl", "http.client", "urllib3", "email"}
