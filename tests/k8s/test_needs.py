"""What pods name and would wait for is looked at before anything is created."""

import pytest
from support.writable_api_server import submit

ASKED = (
    *("--service-account", "trainer", "--env-from-secret", "HF_TOKEN=hf/token"),
    *("--image-pull-secret", "registry", "--env-from-secret", "keys"),
)
PATCH = """
spec:
  pytorchReplicaSpecs:
    Worker:
      template:
        spec:
          containers:
          - name: pytorch
            env:
            - {name: SITE, valueFrom: {configMapKeyRef: {name: site, key: token}}}
            - {name: OTHER, valueFrom: {configMapKeyRef: {name: absent, key: a, optional: true}}}
          volumes:
          - {name: certs, secret: {secretName: certs}}
          - {name: rc, configMap: {name: rc}}
          - name: all
            projected: {sources: [{secret: {name: part, items: [{key: token, path: t}]}}]}
"""
READ_ONLY = """
spec: {pytorchReplicaSpecs: {Worker: {template: {spec: {
  volumes: [{name: data, persistentVolumeClaim: {readOnly: true}}]}}}}}
"""
NAMED = {
    "trainer": "ServiceAccount",
    "hf": "Secret",
    "site": "ConfigMap",
    "certs": "Secret",
    "keys": "Secret",
    "rc": "ConfigMap",
    "part": "Secret",
    "registry": "Secret",
}


@pytest.fixture
def asked(api, tmp_path):
    """Options that name an object of each kind, all of which are there."""
    for name, kind in NAMED.items():
        data = {} if name == "trainer" else {"data": {"token": "eA=="}}
        api.put({"kind": kind, "metadata": {"name": name}, **data})
    (tmp_path / "patch.yaml").write_text(PATCH)
    return [*ASKED, "--patch", str(tmp_path / "patch.yaml")]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("trainer", "there is no ServiceAccount trainer in the namespace default: `kubectl create"),
        (
            "hf",
            "`kubectl create secret generic hf --from-literal=token=... -n default --kubeconfig",
        ),
        ("site", "there is no ConfigMap site"),
        ("certs", "there is no Secret certs"),
        ("keys", "there is no Secret keys"),
        ("rc", "there is no ConfigMap rc"),
        ("part", "`kubectl create secret generic part --from-literal=token=... -n default --kube"),
    ],
)
def test_what_pods_would_wait_for_is_missed_before_anything_is_created(
    api, k8s, asked, name, words
):
    """An account, a Secret or a ConfigMap that is not there: exit code 2, and how to make it."""
    gone = api.objects.pop(next(key for key in api.objects if key[1] == name))
    result = submit(k8s, *asked)
    assert result.exit_code == 2 and words in result.stderr, result.stderr
    assert api.writes == []
    api.put(gone)
    result = submit(k8s, *asked)
    assert result.exit_code == 0 and "warning" not in result.stderr


def test_a_secret_without_the_key_is_told_with_those_that_it_has(api, k8s, asked):
    """A key that is not there keeps a pod from starting as well: nothing is created."""
    result = submit(k8s, "--env-from-secret", "HF_TOKEN=hf/toke")
    assert result.exit_code == 2 and "Secret hf has no key toke: it has token" in result.stderr
    assert api.writes == []


def test_a_pull_secret_that_is_not_there_is_a_warning(api, k8s, asked):
    """The nodes may have the image."""
    api.remove("Secret", "registry")
    result = submit(k8s, *asked)
    assert result.exit_code == 0 and "warning: there is no Secret registry" in result.stderr


def test_what_the_user_may_not_see_is_left_to_the_pods(api, k8s, asked):
    """A 403 is no reason to refuse: the pods may use what their user may not see."""
    api.remove("Secret", "hf")
    api.secrets_are_hidden, api.forbidden = True, {"GET persistentvolumeclaims"}
    result = submit(k8s, *asked)
    assert result.exit_code == 0 and "Secret hf" not in result.stderr


# -- claims --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "modes", "read_only", "words"),
    [
        ("runs", "ReadWriteOnce", False, "(--runs) is ReadWriteOnce: pods on other nodes"),
        ("runs", "ReadWriteOncePod", False, "is ReadWriteOncePod: other pods than the first"),
        ("runs", "ReadOnlyMany", False, "the pods write to it: use ReadWriteMany"),
        ("data", "ReadOnlyMany", False, "add --patch with readOnly: true in the persistentVol"),
        ("data", "ReadOnlyMany", True, ""),
        ("data", "ReadWriteOnce", True, "(--data) is ReadWriteOnce: pods on other"),
    ],
)
def test_a_claim_that_may_not_do_is_a_warning(api, k8s, tmp_path, claim, modes, read_only, words):
    """ReadWriteOnce may do on one node, and the user is told."""
    api.objects["persistentvolumeclaims", claim]["spec"]["accessModes"] = [modes]
    (tmp_path / "read.yaml").write_text(READ_ONLY)
    result = submit(k8s, *(["--patch", str(tmp_path / "read.yaml")] if read_only else []))
    assert result.exit_code == 0 and words in result.stderr
    assert ("warning" in result.stderr) is bool(words)
