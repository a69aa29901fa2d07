"""`diff` and `submit --dry-run`: what a submit would do, and nothing done."""

import json

import pytest
import yaml
from click.testing import CliRunner
from support.writable_api_server import job, submit

from gptddp.k8s.cli.main import cli
from gptddp.k8s.objects import QUEUE
from gptddp.k8s.render import companions


def diff(api, *args, stdin=None):
    given = ["diff", "--kubeconfig", str(api.kubeconfig), "--name", "demo", *args]
    return CliRunner().invoke(cli, given, input=stdin)


def test_the_same_job_has_no_difference(api):
    """Exit code 0 and not a word, also where the server has added what it adds."""
    submit(api.command_line)
    worker = job(api)["spec"]["pytorchReplicaSpecs"]["Worker"]
    worker["template"]["metadata"]["creationTimestamp"] = None
    worker["template"]["spec"]["containers"][0]["ports"][0]["protocol"] = "TCP"
    job(api)["spec"]["runPolicy"]["suspend"] = True  # a state, as a queue sets it
    before = len(api.writes)
    done = diff(api, "--replicas", "4")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")
    assert len(api.writes) == before


def test_each_changed_field_is_a_line_and_when_it_takes_effect_is_said(api):
    """Exit code 1; of a template, that running pods stay as they are."""
    submit(api.command_line)
    done = diff(api, "--replicas", "4", "--cpu", "2", "--", "--steps", "7000")
    assert done.exit_code == 1
    place = "spec.pytorchReplicaSpecs.Worker.template.spec.containers[pytorch]"
    assert done.stdout.splitlines() == [
        "pytorchjob.kubeflow.org/demo differs",
        f"  {place}.args[--steps]: (none) -> 7000",
        f"  {place}.resources.requests.cpu: 1 -> 2",
        f"  {place}.resources.limits.cpu: 1 -> 2",
    ]
    assert "gptddp-k8s delete demo" in done.stderr
    assert "takes effect on pods that are created later" in done.stderr


def test_of_a_scaled_job_scale_is_named(api):
    """Submit leaves it as it is: so it is said."""
    submit(api.command_line)
    api.command_line("scale", "demo", "--replicas", "2")
    done = diff(api, "--replicas", "4")
    assert done.exit_code == 1 and "Worker.replicas: 2 -> 4" in done.stdout
    assert "gptddp-k8s scale demo" in done.stderr and "created later" not in done.stderr


def test_a_companion_that_was_changed_or_deleted_differs(api):
    """What others have added to it does not; what was taken from it does."""
    submit(api.command_line)
    api.objects["serviceaccounts", "demo"]["secrets"] = [{"name": "token"}]
    api.objects["poddisruptionbudgets", "demo"]["spec"]["maxUnavailable"] = 3
    del api.objects["networkpolicies", "demo"]
    done = diff(api, "--replicas", "4", "-o", "json")
    assert done.exit_code == 1
    found = {change["kind"]: change for change in json.loads(done.stdout)}
    assert set(found) == {"PodDisruptionBudget", "NetworkPolicy"}
    assert {change["name"] for change in found.values()} == {"demo"}
    assert found["NetworkPolicy"]["action"] == "create"
    fields = [{"path": "spec.maxUnavailable", "old": "3", "new": "1"}]
    assert found["PodDisruptionBudget"]["fields"] == fields


def test_what_a_submit_would_take_from_a_companion_is_a_difference(api):
    """A rule that somebody has added to the NetworkPolicy, were it `{}`: lists are set whole."""
    submit(api.command_line)
    api.objects["networkpolicies", "demo"]["spec"]["ingress"].append({})
    assert "  spec.ingress[2]: {} -> (none)" in diff(api, "--replicas", "4").stdout.splitlines()
    assert "demo configured" in submit(api.command_line, "--dry-run=server").stdout


def test_labels_that_others_have_put_on_a_job_are_no_difference(api):
    """Neither those nor annotations; one of ours is, lost or new."""
    submit(api.command_line)
    meta = job(api)["metadata"]
    meta["labels"]["audited"] = meta["annotations"]["audited"] = "yes"
    assert diff(api, "--replicas", "4").exit_code == 0
    meta["labels"][QUEUE] = meta["labels"].pop("app.kubernetes.io/part-of")
    lines = diff(api, "--replicas", "4").stdout.splitlines()
    for key in ("app.kubernetes.io/part-of", QUEUE):
        assert any(f"metadata.labels.{key}: " in line for line in lines), key
    assert not any("audited" in line for line in lines)


def test_the_same_submit_says_what_others_have_changed_in_the_job(api):
    """The job is not called the very same when it is not; one that was scaled is."""
    submit(api.command_line)
    job(api)["spec"]["runPolicy"]["backoffLimit"] = 5
    told = submit(api.command_line)
    assert told.exit_code == 0 and "this very spec" not in told.stderr
    assert "  spec.runPolicy.backoffLimit: submitted with (none), is 5\n" in told.stderr
    del job(api)["spec"]["runPolicy"]["backoffLimit"]
    api.command_line("scale", "demo", "--replicas", "2")
    assert "this very spec" in submit(api.command_line).stderr


def test_a_job_that_is_not_there_would_be_created(api):
    """Exit code 1, and every object is named."""
    done = diff(api)
    assert done.exit_code == 1
    assert done.stdout.count("would be created") == 1 + len(companions.KINDS)


@pytest.mark.parametrize("broken", ["down", "refused", "foreign", "rule"])
def test_an_error_is_no_difference(api, broken):
    """An exit code above 1: an API server that is away or refuses, another's job, a broken rule."""
    args = []
    if broken == "down":
        api.down = True
    elif broken == "refused":
        api.refuse["PyTorchJob"] = (404, 'namespaces "default" not found')
    elif broken == "foreign":
        submit(api.command_line)
        del job(api)["metadata"]["labels"]
    else:
        args = ["--grace-s", "1"]
    done = diff(api, *args)
    assert done.exit_code > 1 and done.stderr.startswith("error: ") and not done.stdout


def test_a_job_file_comes_from_stdin(api):
    """`-f -`, in diff as in submit and render; both of its tables count."""
    text = "[job]\nname = 'demo'\nreplicas = 4\n[train]\nsteps = 70\n"
    assert api.command_line("submit", "-f", "-", stdin=text).exit_code == 0
    assert diff(api, "-f", "-", stdin=text).exit_code == 0
    changed = diff(api, "-f", "-", stdin=text.replace("70", "71"))
    assert "args[--steps]: 70 -> 71" in changed.stdout
    wrong = diff(api, "-f", "-", stdin="[job]\nreplica = 4\n")
    assert wrong.exit_code == 2 and "stdin: unknown key job.replica: did you mean" in wrong.stderr
    torn = diff(api, "-f", "-", stdin="[job\n")
    assert torn.exit_code == 2 and "stdin is not valid TOML" in torn.stderr


# -- submit --dry-run ----------------------------------------------------------------------------


def test_a_clients_dry_run_asks_nobody(tmp_path):
    """No cluster is there; the names are said as kubectl says them, or the objects printed."""
    run = lambda *args: CliRunner().invoke(  # noqa: E731
        cli, ["submit", "--name", "demo", "--dry-run=client", *args]
    )
    assert "pytorchjob.kubeflow.org/demo created (dry run)" in run().stdout.splitlines()
    rendered = CliRunner().invoke(cli, ["render", "--name", "demo"])
    assert run("-o", "yaml").stdout == rendered.stdout


def test_a_servers_dry_run_sends_every_object_and_creates_none(api):
    """Strictly, each with dryRun=All, the Secret and a pod too."""
    done = submit(api.command_line, "--dry-run=server")
    assert done.exit_code == 0 and not api.writes
    kinds = ["serviceaccount", "networkpolicy", "poddisruptionbudget", "secret", "pytorchjob"]
    assert [line.split("/")[0].split(".")[0] for line in done.stdout.splitlines()] == kinds
    assert all(line.endswith(" created (server dry run)") for line in done.stdout.splitlines())
    posts = [it for it in api.requests if it.startswith("POST")]
    kinds = "pods networkpolicies poddisruptionbudgets secrets serviceaccounts pytorchjobs"
    assert sorted(it.split()[1] for it in posts) == sorted(kinds.split())


def test_a_dry_run_without_the_right_to_secrets_is_warned(api):
    """As a submit would be: the job can do without a key."""
    api.forbidden = {"POST secrets"}
    done = submit(api.command_line, "--dry-run=server")
    assert done.exit_code == 0 and "secret/" not in done.stdout
    assert "warning: the job would run without a key of its rendezvous" in done.stderr


def test_what_the_server_refuses_is_said(api):
    """The server's words, and that nothing was created."""
    api.refuse["NetworkPolicy"] = (403, "networkpolicies is forbidden")
    done = submit(api.command_line, "--dry-run=server")
    assert done.exit_code == 1 and not api.writes
    assert "networkpolicies is forbidden" in done.stderr and "this was a dry run" in done.stderr


def test_a_dry_run_beside_a_job_says_what_stays(api):
    """Unchanged, configured, or refused with the difference."""
    submit(api.command_line)
    api.objects["poddisruptionbudgets", "demo"]["spec"]["maxUnavailable"] = 3
    before = list(api.writes)
    done = submit(api.command_line, "--dry-run=server")
    words = {line.split("/")[0].split(".")[0]: line.split()[1] for line in done.stdout.splitlines()}
    assert words["poddisruptionbudget"] == "configured"
    assert {words[it] for it in ("pytorchjob", "secret", "networkpolicy")} == {"unchanged"}
    other = submit(api.command_line, "--dry-run=server", "--cpu", "2")
    assert other.exit_code == 2 and "resources.limits.cpu: 1 -> 2" in other.stderr
    assert api.writes == before
    assert api.objects["poddisruptionbudgets", "demo"]["spec"]["maxUnavailable"] == 3


def test_no_key_is_shown(api):
    """The Secret's data is not printed."""
    submit(api.command_line)
    done = submit(api.command_line, "--dry-run=server", "-o", "yaml")
    (secret,) = [it for it in yaml.safe_load_all(done.stdout) if it["kind"] == "Secret"]
    assert not secret.get("data") and "stringData" not in secret


@pytest.mark.parametrize("output", ["name", "yaml", "json"])
def test_what_was_submitted_is_printed_as_asked(api, output):
    """The job as the server has it; the notes stay on stderr."""
    done = submit(api.command_line, "-o", output)
    if output == "name":
        assert done.stdout == "pytorchjob.kubeflow.org/demo\n"
    else:
        (shown,) = yaml.safe_load_all(done.stdout)
        assert shown["metadata"]["uid"] == job(api)["metadata"]["uid"]


@pytest.mark.parametrize(
    "args",
    [
        ["--dry-run=server", "--wait"],
        ["--dry-run=client", "--follow"],
        ["--follow", "-o", "json"],
        ["--local", "--dry-run=server"],
        ["--local", "-o", "yaml"],
    ],
)
def test_options_that_cannot_be_together_are_refused(api, args):
    """Exit code 2, before anything is asked."""
    done = submit(api.command_line, *args)
    assert done.exit_code == 2 and "no meaning" in done.stderr and not api.requests
