"""What pods name and need is looked at before anything is created; companions may be left out."""

import pytest
from support.writable_api_server import job, submit

PATCH = """
spec: {pytorchReplicaSpecs: {Worker: {template: {spec: {
  containers: [{name: pytorch, envFrom: [{configMapRef: {name: site}}, {secretRef: {name: keys}}]}],
  volumes: [{name: certs, secret: {secretName: certs}}, {name: rc, configMap: {name: rc}}]}}}}}
"""
NAMED = {
    "trainer": "ServiceAccount",
    "hf": "Secret",
    "site": "ConfigMap",
    "certs": "Secret",
    "keys": "Secret",
    "rc": "ConfigMap",
    "registry": "Secret",
}


@pytest.fixture
def asked(tmp_path):
    """Options that name the objects of `NAMED`."""
    (tmp_path / "patch.yaml").write_text(PATCH)
    return (
        *("--service-account", "trainer", "--env-from-secret", "HF_TOKEN=hf/token"),
        *("--image-pull-secret", "registry", "--patch", str(tmp_path / "patch.yaml")),
    )


def put_named(api, but=""):
    """What `asked` names, but for one of it."""
    for name in {*NAMED} - {but}:
        data = {} if name == "trainer" else {"data": {"token": "eA=="}}
        api.put({"kind": NAMED[name], "metadata": {"name": name}, **data})


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("trainer", "there is no ServiceAccount trainer in the namespace default: `kubectl create"),
        ("hf", "`kubectl create secret generic hf --from-literal=token=... -n default`"),
        ("site", "there is no ConfigMap site"),
        ("certs", "there is no Secret certs"),
        ("keys", "there is no Secret keys"),
        ("rc", "there is no ConfigMap rc"),
    ],
)
def test_what_pods_would_wait_for_is_missed_before_all_else(api, k8s, asked, name, words):
    """An account, a Secret or a ConfigMap that is not there: exit code 2, and how to make it."""
    put_named(api, but=name)
    result = submit(k8s, *asked)
    assert result.exit_code == 2 and words in result.stderr, result.stderr
    assert api.writes == []
    put_named(api)
    assert submit(k8s, *asked).exit_code == 0


def test_a_short_job_is_told_the_same(api, k8s):
    """`prepare` does not wait for a Secret that is not there."""
    result = k8s("prepare", "--source", "runs", "--env-from-secret", "PASS=proxy/pass")
    assert result.exit_code == 2 and "there is no Secret proxy" in result.stderr
    assert api.writes == []


def test_a_secret_without_the_key_is_told_with_those_that_it_has(api, k8s):
    """A key that is not there keeps a pod from starting as well."""
    put_named(api)
    result = submit(k8s, "--env-from-secret", "HF_TOKEN=hf/toke")
    assert result.exit_code == 2 and "Secret hf has no key toke: it has token" in result.stderr


def test_a_pull_secret_that_is_not_there_is_a_warning(api, k8s, asked):
    """The nodes may have the image."""
    put_named(api, but="registry")
    result = submit(k8s, *asked)
    assert result.exit_code == 0 and "warning: there is no Secret registry" in result.stderr


def test_who_may_not_see_secrets_submits_without_a_word_about_them(api, k8s, asked):
    """A 403 is no reason to refuse: the pods may use what their user may not see."""
    put_named(api, but="hf")
    api.secrets_are_hidden = True
    result = submit(k8s, *asked)
    assert result.exit_code == 0 and "Secret hf" not in result.stderr


def test_a_read_only_claim_is_told_what_mounts_it_so(api, k8s, tmp_path):
    """ReadOnlyMany without that patch is a warning, and with it none."""
    api.objects["persistentvolumeclaims", "data"]["spec"]["accessModes"] = ["ReadOnlyMany"]
    volume = "[{name: data, persistentVolumeClaim: {readOnly: true}}]"
    text = "spec: {pytorchReplicaSpecs: {Worker: {template: {spec: {volumes: %s}}}}}"
    (tmp_path / "read.yaml").write_text(text % volume)
    result = submit(k8s, "--patch", str(tmp_path / "read.yaml"))
    assert result.exit_code == 0 and "ReadOnlyMany" not in result.stderr
    k8s("delete", "demo", "--no-wait")
    result = submit(k8s)
    assert (
        result.exit_code == 0
        and "with readOnly: true in the persistentVolumeClaim" in result.stderr
    )
    result = k8s("prepare", "--source", "data", "--data", "runs")
    assert result.exit_code == 0 and "with --read-only-source" in result.stderr


def test_companions_that_are_left_out_are_not_made(api, k8s):
    """Neither at the first submit nor at the next one, and delete does without them."""
    out = ("--without", "serviceaccount", "--without", "networkpolicy")
    assert submit(k8s, *out).exit_code == 0
    assert submit(k8s, *out).stdout.endswith("unchanged\n")
    made = {line.removeprefix("create ") for line in api.writes if line.startswith("create")}
    assert made == {"PodDisruptionBudget", "Secret", "PyTorchJob"}
    result = k8s("delete", "demo")
    assert result.exit_code == 0 and "networkpolicy" not in result.stdout


def test_a_companion_of_an_earlier_submit_that_is_left_out_now_is_named(api, k8s):
    """The same job again leaves it, with the command that removes it; it is not asked for else."""
    submit(k8s)
    result = submit(k8s, "--without", "networkpolicy")
    assert "kubectl delete networkpolicy.networking.k8s.io/demo -n default" in result.stderr
    api.objects.pop(("networkpolicies", "demo"))
    assert "warning" not in submit(k8s, "--without", "networkpolicy").stderr


def test_who_may_not_touch_a_companion_leaves_it_out(api, k8s):
    """Neither the first submit nor the next one asks for what is left out, and is refused it."""
    verbs = ("GET", "POST", "PATCH")
    api.forbidden = {f"{verb} networkpolicies" for verb in verbs}
    assert submit(k8s).exit_code == 1
    for word in ("created", "unchanged"):
        result = submit(k8s, "--without", "networkpolicy")
        assert result.exit_code == 0 and result.stdout.endswith(f" {word}\n"), result.stderr


def test_the_pod_that_the_server_is_asked_about_is_the_whole_pod(api, k8s):
    """With the labels and annotations by which policies judge it."""
    submit(k8s)
    (pod,) = (it for it in api.dry_runs if it["kind"] == "Pod")
    template = job(api)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["metadata"]
    assert pod["metadata"] == {**template, "name": "demo-worker-0"}
