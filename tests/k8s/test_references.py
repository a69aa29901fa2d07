"""What pods name and need is looked at before anything is created; companions may be left out."""

import pytest
from support.writable_api_server import job, submit

ASKED = (
    *("--service-account", "trainer", "--env-from-secret", "HF_TOKEN=hf/token"),
    *("--env-from-configmap", "site", "--mount-secret", "certs=/etc/certs"),
    *("--image-pull-secret", "registry", "--env-from-secret", "keys"),
    *("--mount-configmap", "rc=/etc/rc"),
)
NAMED = {
    "trainer": "ServiceAccount",
    "hf": "Secret",
    "site": "ConfigMap",
    "certs": "Secret",
    "keys": "Secret",
    "rc": "ConfigMap",
    "registry": "Secret",
}


def put_named(api, but=""):
    """What `ASKED` names, but for one of it."""
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
def test_what_pods_would_wait_for_is_missed_before_anything_is_created(api, k8s, name, words):
    """An account, a Secret or a ConfigMap that is not there: exit code 2, and how to make it."""
    put_named(api, but=name)
    result = submit(k8s, *ASKED)
    assert result.exit_code == 2 and words in result.stderr, result.stderr
    assert api.writes == []
    put_named(api)
    assert submit(k8s, *ASKED).exit_code == 0


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


def test_a_pull_secret_that_is_not_there_is_a_warning(api, k8s):
    """The nodes may have the image."""
    put_named(api, but="registry")
    result = submit(k8s, *ASKED)
    assert result.exit_code == 0 and "warning: there is no Secret registry" in result.stderr


def test_who_may_not_see_secrets_submits_without_a_word_about_them(api, k8s):
    """A 403 is no reason to refuse: the pods may use what their user may not see."""
    put_named(api, but="hf")
    api.secrets_are_hidden = True
    result = submit(k8s, *ASKED)
    assert result.exit_code == 0 and "Secret hf" not in result.stderr


def test_a_read_only_claim_is_told_the_option_for_it(api, k8s):
    """ReadOnlyMany without --read-only-data is a warning, and with it none."""
    api.objects["persistentvolumeclaims", "data"]["spec"]["accessModes"] = ["ReadOnlyMany"]
    result = submit(k8s, "--read-only-data")
    assert result.exit_code == 0 and "ReadOnlyMany" not in result.stderr
    k8s("delete", "demo", "--no-wait")
    result = submit(k8s)
    assert result.exit_code == 0 and "with --read-only-data" in result.stderr


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


def test_egress_is_put_into_the_policy_of_a_job_that_runs(api, k8s):
    """The pods stay: the policy is beside them."""
    assert submit(k8s).exit_code == 0
    result = submit(k8s, "--egress", "10.0.0.0/8:443")
    assert result.stdout.endswith("unchanged\n")
    policy = api.objects["networkpolicies", "demo"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"] and len(policy["egress"]) == 3
    submit(k8s)
    assert api.objects["networkpolicies", "demo"]["spec"]["policyTypes"] == ["Ingress"]


def test_the_pod_that_the_server_is_asked_about_is_the_whole_pod(api, k8s):
    """With the labels and annotations by which policies judge it."""
    submit(k8s, "--label", "team=nlp", "--annotation", "example.com/cost=1")
    (pod,) = (it for it in api.dry_runs if it["kind"] == "Pod")
    template = job(api)["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["metadata"]
    assert pod["metadata"] == {**template, "name": "demo-worker-0"}
